from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agl_runtime.algorithms.losses import (
    LossSettings,
    PolicyLoss,
    clipped_surrogate,
    k3,
    policy_loss,
    staleness_weight,
)
from agl_runtime.errors import TrainerError

torch.set_num_threads(1)


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def loss(new: Tensor, settings: LossSettings = LossSettings(), **changes: Tensor) -> PolicyLoss:  # noqa: B008 (frozen)
    """A single token unless told otherwise: everything that is not given is zero, or one for weight and advantage."""
    given_ = {
        "old": torch.zeros_like(new),
        "advantages": torch.ones_like(new),
        "weights": torch.ones_like(new),
        **changes,
    }
    given_.setdefault("recorded", given_["old"])
    return policy_loss(new, settings=settings, **given_)


class TestSurrogate:
    @pytest.mark.parametrize(
        ("ratio", "advantage", "expected"),
        [
            (1.0, 2.0, -2.0),
            (1.1, 2.0, -2.2),
            (1.5, 2.0, -2.6),  # held at 1 + 0.3
            (0.5, 2.0, -1.0),  # worse than before: not held
            (0.5, -2.0, 1.6),  # held at 1 - 0.2
            (1.5, -2.0, 3.0),  # worse than before: not held
        ],
    )
    def test_known_values_with_unequal_bounds(self, ratio: float, advantage: float, expected: float):
        assert clipped_surrogate(values(ratio), values(advantage), 0.2, 0.3).item() == pytest.approx(expected)

    def test_where_the_clip_holds_there_is_no_gradient_and_elsewhere_that_of_the_ratio(self):
        new = values(0.5, -0.5, 0.05, -0.5, 0.5).requires_grad_()
        advantages = values(1, -1, 2, 3, -3)
        loss(new, advantages=advantages).loss.backward()
        expected = [0.0, 0.0, -2 * math.exp(0.05), -3 * math.exp(-0.5), 3 * math.exp(0.5)]
        assert new.grad.tolist() == pytest.approx(expected)

    def test_at_the_old_policy_the_gradient_is_the_policy_gradient(self):
        new = values(-1, -2).requires_grad_()
        weights, advantages = values(0.25, 0.75), values(2, -1)
        loss(new, old=values(-1, -2), weights=weights, advantages=advantages).loss.backward()
        assert new.grad.tolist() == pytest.approx((-weights * advantages).tolist())


class TestStaleness:
    def test_the_weight_is_truncated_above_only(self):
        old, recorded = values(-1, -1, -1), values(-1, -1 - math.log(1.5), -5)
        assert staleness_weight(old, recorded, 2.0).tolist() == pytest.approx([1.0, 1.5, 2.0])
        assert staleness_weight(values(-5), values(-1), 2.0).item() == pytest.approx(math.exp(-4))
        assert not staleness_weight(old.requires_grad_(), recorded, 2.0).requires_grad

    def test_the_weight_scales_the_surrogate_and_is_a_constant_to_the_gradient(self):
        new, old = values(-1.0).requires_grad_(), values(-1.0).requires_grad_()
        result = loss(new, LossSettings(tis_cap=2.0), old=old, recorded=values(-1 - math.log(1.5)))
        assert result.loss.item() == pytest.approx(-1.5)
        result.loss.backward()
        assert new.grad.item() == pytest.approx(-1.5)
        assert old.grad is None

    def test_recorded_logprobs_as_the_old_ones_mean_weight_one(self):
        recorded = values(-0.3, -7.0)
        assert staleness_weight(recorded, recorded, 0.9999999).tolist() == pytest.approx([1.0, 1.0])
        new = values(-0.2, -7.1)
        with_cap = loss(new, LossSettings(tis_cap=2.0), old=recorded, recorded=recorded)
        assert with_cap.loss.item() == loss(new, LossSettings(), old=recorded).loss.item()

    def test_without_a_cap_stale_tokens_are_not_corrected(self):
        assert loss(values(-1.0), old=values(-1.0), recorded=values(-3.0)).loss.item() == pytest.approx(-1.0)

    def test_the_kl_penalty_is_not_corrected(self):
        settings = LossSettings(kl_coef=1.0, tis_cap=2.0)
        result = loss(
            values(-1.0),
            settings,
            old=values(-1.0),
            recorded=values(-9.0),
            advantages=values(0),
            reference=values(-2.0),
        )
        assert result.loss.item() == pytest.approx(math.exp(-1) - 1 + 1)


class TestKl:
    def test_known_value_and_gradient(self):
        new = values(-1.0).requires_grad_()
        k3(new, values(-2.0)).sum().backward()
        assert k3(new, values(-2.0)).item() == pytest.approx(math.exp(-1.0) + 1.0 - 1.0)
        assert new.grad.item() == pytest.approx(1 - math.exp(-1.0))

    def test_in_expectation_it_is_the_kl_of_the_new_policy_from_the_reference(self):
        p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
        estimate = (p * k3(p.log(), q.log())).sum()
        assert estimate.item() == pytest.approx((p * (p / q).log()).sum().item())

    def test_it_enters_the_loss_with_its_coefficient(self):
        reference = values(-2.0)
        with_kl = loss(values(-1.0), LossSettings(kl_coef=0.1), old=values(-1.0), reference=reference)
        assert with_kl.loss.item() == pytest.approx(-1 + 0.1 * math.exp(-1))

    def test_a_penalty_without_a_reference_is_refused(self):
        with pytest.raises(TrainerError, match=r"^The KL penalty has no reference policy\. Set train\.kl_coef to 0"):
            loss(values(0.0), LossSettings(kl_coef=0.1))


class TestMetrics:
    def test_sums_over_micro_batches_are_those_of_the_whole(self):
        new, old, advantages = values(-0.1, -0.9, -2, -1.5), values(-1, -1, -1, -1), values(1, -1, 1, -1)
        weights, entropy = values(0.1, 0.2, 0.3, 0.4), values(1, 2, 3, 4)
        whole = loss(new, old=old, advantages=advantages, weights=weights, entropy=entropy).metrics
        parts = [
            loss(new[s], old=old[s], advantages=advantages[s], weights=weights[s], entropy=entropy[s]).metrics
            for s in (slice(0, 1), slice(1, 4))
        ]
        assert set(whole) == {"loss", "kl", "clip_fraction", "weight", "entropy"}
        for name, value in whole.items():
            assert sum(part[name].item() for part in parts) == pytest.approx(value.item())
        assert whole["entropy"].item() == pytest.approx(3.0)
        assert whole["weight"].item() == pytest.approx(1.0)

    def test_the_clip_fraction_counts_only_where_the_clip_holds(self):
        new = values(0.5, 0.25, 0.5, -0.5, -0.5, -0.5)
        advantages = values(1, 1, -1, 1, -1, 0)
        weights = torch.full((6,), 0.25).double()
        metrics = loss(new, LossSettings(0.2, 0.3), advantages=advantages, weights=weights).metrics
        assert metrics["clip_fraction"].item() == pytest.approx(0.5), "the first and the fifth"

    def test_kl_is_to_the_old_policy_where_there_is_no_reference(self):
        assert loss(values(-1.0), old=values(-2.0)).metrics["kl"].item() == pytest.approx(math.exp(-1))
        with_reference = loss(values(-1.0), old=values(-2.0), reference=values(-1.0))
        assert with_reference.metrics["kl"].item() == 0.0

    def test_metrics_hold_no_graph(self):
        metrics = loss(values(-1.0).requires_grad_(), old=values(-2.0)).metrics
        assert not any(value.requires_grad for value in metrics.values())


LOGPROB = st.floats(-1e4, 0.0)


@given(LOGPROB, LOGPROB, LOGPROB, LOGPROB, st.floats(-100, 100))
def test_loss_gradient_and_metrics_are_always_finite(
    new: float, old: float, recorded: float, reference: float, advantage: float
):
    def single(x: float) -> Tensor:
        return torch.tensor([x], dtype=torch.float32)

    variable = single(new).requires_grad_()
    settings = LossSettings(kl_coef=0.1, tis_cap=2.0)
    result = loss(
        variable,
        settings,
        old=single(old),
        recorded=single(recorded),
        advantages=single(advantage),
        reference=single(reference),
    )
    result.loss.backward()
    assert math.isfinite(result.loss.item())
    assert torch.isfinite(variable.grad).all()
    assert all(math.isfinite(value.item()) for value in result.metrics.values())
    assert k3(single(new), single(reference)).item() >= 0


def test_tokens_of_weight_zero_change_nothing_in_any_shape():
    new = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]], requires_grad=True)
    weights = torch.tensor([[0.5, 0.5], [0.0, 0.0]])
    loss(new, old=torch.full((2, 2), -1.5), weights=weights).loss.backward()
    assert new.grad[1].tolist() == [0.0, 0.0]
    row = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss(row, old=torch.full((2,), -1.5), weights=weights[0]).loss.backward()
    assert new.grad[0].tolist() == row.grad.tolist()
