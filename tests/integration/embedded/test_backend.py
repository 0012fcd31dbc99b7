"""The whole backend: it serves, learns, saves and goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from agl_runtime.errors import TrainerError
from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer.backends.base import UpdateResult
from fakes.scored import scored_rollouts, totals_of

PROMPT = [65, 66, 67]
IDS = {"return_token_ids": True}


async def improve(backend: Any, policy: Path, *, updates: int = 0, seed: int = 0) -> UpdateResult:
    rollouts = scored_rollouts(AutoModelForCausalLM.from_pretrained(policy), updates=updates, seed=seed)
    result = await backend.update(rollouts, totals_of(rollouts))
    assert isinstance(result, UpdateResult)
    return result


async def greedy(client: Any) -> tuple[list[float], str]:
    """Log-probabilities of a greedy answer, and its version."""
    answer = await client.completions.create(
        model="policy", prompt=PROMPT, temperature=0, max_tokens=5, logprobs=0, extra_body=IDS
    )
    [span] = answer.choices[0].weight_versions
    return answer.choices[0].logprobs.token_logprobs, span["version"]


async def test_an_update_changes_what_is_served_and_its_version(start: Any, noise: Path) -> None:
    backend, model, client = await start(noise, run_epoch=2)
    assert model.policy_version == PolicyVersion(2, 0)
    before = await greedy(client)
    result = await improve(backend, noise)
    after = await greedy(client)
    assert result.version == PolicyVersion(2, 1)
    assert (before[1], after[1]) == ("2.0", "2.1")
    assert after[0] != pytest.approx(before[0], abs=1e-3)
    assert result.metrics["logprob_gap"] < 1e-4
    assert {"loss", "grad_norm", "kl", "clip_fraction", "entropy", "tokens", "seconds"} <= set(result.metrics)


async def test_an_update_without_a_gradient_keeps_the_version(start: Any, noise: Path) -> None:
    backend, _, client = await start(noise)
    rollouts = scored_rollouts(AutoModelForCausalLM.from_pretrained(noise))
    flat = [type(r)(r.group_id, r.reward, 0.0, r.samples) for r in rollouts]
    before = await greedy(client)
    assert (await backend.update(flat, totals_of(flat))).version == PolicyVersion(1, 0)
    assert await greedy(client) == before


async def test_the_trainers_loop_and_the_server_answer_while_an_update_runs(start: Any, noise: Path) -> None:
    backend, _, client = await start(noise, epochs=60)
    rollouts = scored_rollouts(AutoModelForCausalLM.from_pretrained(noise))
    updating = asyncio.create_task(backend.update(rollouts, totals_of(rollouts)))
    models = await client.models.list()
    assert not updating.done()
    assert models.data[0].id == "policy"
    await updating


async def test_a_call_across_an_update_names_both_versions(start: Any, noise: Path) -> None:
    backend, _, client = await start(noise)
    rollouts = scored_rollouts(AutoModelForCausalLM.from_pretrained(noise))
    stream = await client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": "Go on"}],
        seed=2,
        stream=True,
        extra_body=IDS,
    )
    rows = [(await stream.__anext__()).choices[0] for _ in range(3)]
    await backend.update(rollouts, totals_of(rollouts))
    rows += [chunk.choices[0] async for chunk in stream]
    ids = [i for row in rows for i in getattr(row, "token_ids", [])]
    old, new = rows[-1].weight_versions
    assert (old["version"], new["version"]) == ("1.0", "1.1")
    assert (old["start"], new["start"], new["end"]) == (0, old["end"], len(ids))


async def test_a_resumed_backend_makes_the_same_next_update(start: Any, noise: Path, tmp_path: Path) -> None:
    backend, _, _ = await start(noise, mini_batches=2)
    await improve(backend, noise)
    await backend.save(tmp_path / "one", {"updates": 1, "step": 1})
    await improve(backend, noise, updates=1, seed=5)
    await backend.save(tmp_path / "two", {"updates": 2, "step": 2})

    resumed, model, client = await start(noise, run_epoch=2, resume_from=tmp_path / "one", mini_batches=2)
    assert model.policy_version == PolicyVersion(2, 1)
    assert (await greedy(client))[1] == "2.1"
    assert (await improve(resumed, noise, updates=1, seed=5)).version == PolicyVersion(2, 2)
    await resumed.save(tmp_path / "two again", {"updates": 2, "step": 2})

    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("two", "two again"))
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


async def test_a_saved_policy_serves_what_it_served_before(start: Any, noise: Path, tmp_path: Path) -> None:
    backend, _, client = await start(noise)
    await improve(backend, noise)
    await backend.save(tmp_path / "saved", {"updates": 1})
    _, _, other = await start(tmp_path / "saved")
    assert (await greedy(other))[0] == pytest.approx((await greedy(client))[0], abs=1e-5)


async def test_an_update_that_fails_takes_the_version_from_weights_that_may_have_changed(
    start: Any, noise: Path
) -> None:
    backend, _, client = await start(noise, mini_batches=2)
    rollouts = scored_rollouts(AutoModelForCausalLM.from_pretrained(noise))
    broken = [type(r)(r.group_id, r.reward, float("inf"), r.samples) for r in rollouts]
    with pytest.raises(TrainerError, match="gradient of an update is not finite"):
        await backend.update(broken, totals_of(broken))
    assert (await greedy(client))[1] == "1.1"


async def test_decode_keeps_special_tokens(start: Any, noise: Path) -> None:
    backend, _, _ = await start(noise)
    assert backend.decode([1, 2]) == "<|im_start|><|im_end|>"


async def test_a_broken_folder_is_a_clear_error_and_leaves_nothing_running(start: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="There is no model folder"):
        await start(tmp_path / "nowhere")


async def test_a_broken_checkpoint_is_a_clear_error(start: Any, noise: Path, tmp_path: Path) -> None:
    backend, _, _ = await start(noise)
    await backend.save(tmp_path / "c", {"updates": 0})
    (tmp_path / "c" / "trainer.pt").unlink()
    with pytest.raises(TrainerError, match=r"trainer\.pt cannot be read"):
        await start(noise, resume_from=tmp_path / "c")


@pytest.mark.parametrize("stream", [False, True])
async def test_stopping_ends_calls_in_flight(
    start: Any, noise: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    backend, _, client = await start(noise, max_batch=1)
    messages = [{"role": "user", "content": "Go on"}]
    first = await client.chat.completions.create(model="policy", messages=messages, stream=True, seed=2)
    await first.__anext__()

    async def second() -> None:
        answer = await client.chat.completions.create(model="policy", messages=messages, stream=stream, n=50)
        if stream:
            async for _ in answer:
                pass

    waiting = asyncio.create_task(second())
    await client.models.list()
    await backend.stop()
    with pytest.raises(openai.APIError):
        await waiting
    assert "Traceback" not in caplog.text


async def test_a_backend_that_does_not_run_says_so(start: Any, noise: Path) -> None:
    backend, _, _ = await start(noise)
    await backend.stop()
    await backend.stop()
    with pytest.raises(TrainerError, match="The embedded backend does not run"):
        backend.decode([1])
