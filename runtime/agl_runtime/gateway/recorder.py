"""What goes on record of a call: its intent, its answer with a verdict, its failure, or that it was cut off."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from agl_runtime.errors import ConflictError, NotFoundError, StoreError
from agl_runtime.gateway.attempts import Attempt, Call
from agl_runtime.gateway.fidelity import Circumstances, Verdict, judge
from agl_runtime.gateway.internal import Answer, CallRefused, Json
from agl_runtime.gateway.metrics import Metrics
from agl_runtime.gateway.parents import parent_of
from agl_runtime.gateway.registry import Registry
from agl_runtime.store.base import Commit, Intent, Store

logger = logging.getLogger(__name__)
FAILURE_EVENT = "upstream_failure"


def sealed(attempt_id: str) -> CallRefused:
    return CallRefused(f"Attempt {attempt_id} has ended; its late calls are refused.", http_status=409)


@dataclass(frozen=True, slots=True)
class Refusing:
    """Within it the store's refusals, and its failures, become those of a call."""

    attempt_id: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConflictError):
            raise sealed(self.attempt_id) from error
        if isinstance(error, NotFoundError):
            raise CallRefused(error.what, http_status=404) from error
        if isinstance(error, StoreError):
            logger.error("attempt %s: a call cannot be recorded: %s", self.attempt_id, error)
            raise CallRefused(error.what, error.fix, http_status=503) from error


@dataclass(frozen=True)
class Recorder:
    store: Store
    registry: Registry
    metrics: Metrics

    async def intend(self, call: Call) -> None:
        """Durable before the call is sent on. Raises CallRefused for a sealed attempt."""
        messages = call.request.body.get("messages")
        intent = Intent(
            call_id=call.call_id,
            rollout_id=call.attempt.rollout_id,
            attempt_id=call.attempt.attempt_id,
            dialect=call.dialect.name,
            model=call.request.model,
            request=call.request.original,
            kind="auxiliary" if call.is_auxiliary else "main",
            parent_id=call.attempt.answers.get(call.request.continues or "")
            or parent_of(messages if isinstance(messages, list) else [], call.attempt.answered),
            retry_key=call.retry_key,
            is_long=call.is_long,
        )
        with Refusing(call.attempt.attempt_id):
            await self.store.begin_call(intent)
        call.attempt.is_resumed = False

    async def answer(self, call: Call, answer: Answer, response: Json) -> None:
        """Durable before the last byte leaves. Raises CallRefused when the attempt was sealed meanwhile."""
        if call.reply is None:
            raise ValueError("only an answered call has an answer")
        around = Circumstances(
            mode=call.mode,
            policy=self.registry.policy,
            dispatched=call.reply.model,
            present=self.registry.current(call.reply.model),
            auxiliary=call.is_auxiliary,
            changed_params=call.prepared.changed_params,
        )
        await self._commit(call, response, answer, judge(answer, around), http_status=200)
        call.attempt.remember(call.call_id, call.request.answer_id, answer.tool_calls)

    async def failure(self, call: Call, refused: CallRefused) -> None:
        """The error that the harness gets, with what had come of an answer before it."""
        partial = call.partial_answer()
        reason = "cut" if partial.choices else refused.reason
        response = {**self._said(call, partial), **call.dialect.error(refused)}
        await self._commit(call, response, partial, Verdict(False, reason, ()), http_status=refused.http_status)
        if refused.infrastructure:
            await self.note_failure(call.attempt, refused, call.call_id)

    async def cut(self, call: Call) -> None:
        """The harness left before its answer was whole."""
        partial = call.partial_answer()
        verdict = Verdict(False, "cut", ())
        await self._commit(call, self._said(call, partial), partial, verdict, http_status=499)

    async def delivered(self, call_id: str) -> None:
        """Only a note: where it fails, the harness has its answer, and goes on with its next call."""
        try:
            await self.store.mark_delivered(call_id)
        except StoreError as error:
            logger.error("call %s: that it was delivered cannot be recorded: %s", call_id, error)

    def _said(self, call: Call, partial: Answer) -> Json:
        return call.dialect.render(call.request, partial) if partial.choices else {}

    async def note_failure(self, attempt: Attempt, refused: CallRefused, call_id: str | None = None) -> None:
        """Tell the controller that a call could not be served through no fault of the agent."""
        self.metrics.upstream_failures += 1
        data = {"call_id": call_id, "http_status": refused.http_status, "message": refused.what}
        logger.warning("rollout %s attempt %s: %s", attempt.rollout_id, attempt.attempt_id, refused.what)
        with Refusing(attempt.attempt_id):
            await self.store.add_event(attempt.rollout_id, attempt.attempt_id, FAILURE_EVENT, data)

    async def _commit(self, call: Call, response: Json, answer: Answer, verdict: Verdict, *, http_status: int) -> None:
        commit = Commit(
            call_id=call.call_id,
            response=response,
            prompt_ids=answer.prompt_ids,
            sampled_ids=answer.sampled_ids,
            logprobs=answer.logprobs,
            spans=verdict.spans,
            trainable=verdict.trainable,
            reason=verdict.reason,
            finish_reason=answer.finish_reason,
            http_status=http_status,
            upstream=call.reply.model if call.reply else None,
            latency_ms=call.latency_ms(),
            retry_count=call.reply.retries if call.reply else 0,
            usage=answer.usage,
            routed=answer.routed if call.mode == "train" else None,
            side={
                "dialect": dict(call.request.side),
                "answer_id": call.request.answer_id if http_status == 200 else None,
                "tool_call_ids": list(answer.tool_calls),
            },
        )
        with Refusing(call.attempt.attempt_id):
            await self.store.commit_call(commit)
        self.metrics.calls += 1
        self.metrics.call_s += commit.latency_ms / 1000
        self.metrics.prompt_tokens += answer.prompt_ids.size
        self.metrics.sampled_tokens += answer.sampled_ids.size
