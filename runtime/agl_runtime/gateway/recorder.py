"""What goes on record of a call: its intent, its answer with a verdict, its failure, or that it was cut off."""

from __future__ import annotations

import logging

import numpy as np

from agl_runtime.errors import ConflictError, NotFoundError
from agl_runtime.gateway.attempts import Attempt
from agl_runtime.gateway.call import Call
from agl_runtime.gateway.fidelity import Circumstances, Verdict, judge
from agl_runtime.gateway.internal import Answer, CallRefused, Json
from agl_runtime.gateway.metrics import Metrics
from agl_runtime.gateway.parents import parent_of
from agl_runtime.gateway.registry import Registry
from agl_runtime.store.base import Commit, Intent, Store

logger = logging.getLogger(__name__)
FAILURE_EVENT = "upstream_failure"


def sealed(attempt_id: str) -> CallRefused:
    return CallRefused(f"Attempt {attempt_id} has ended; its late calls are refused.", status=409)


class Recorder:
    def __init__(self, store: Store, registry: Registry, metrics: Metrics) -> None:
        self._store = store
        self._registry = registry
        self._metrics = metrics

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
            parent_id=parent_of(messages, call.attempt.answered) if isinstance(messages, list) else None,
            retry_key=call.retry_key,
        )
        try:
            await self._store.begin_call(intent)
        except ConflictError as error:
            raise sealed(call.attempt.attempt_id) from error
        except NotFoundError as error:
            raise CallRefused(error.what, status=404) from error

    async def answer(self, call: Call, answer: Answer, response: Json) -> None:
        """Durable before the last byte leaves. Raises CallRefused when the attempt was sealed meanwhile."""
        if call.reply is None:
            raise ValueError("only an answered call has an answer")
        around = Circumstances(
            mode=call.mode,
            policy=self._registry.policy,
            dispatched=call.reply.model,
            present=self._registry.current(call.reply.model),
            auxiliary=call.is_auxiliary,
            changed_params=call.prepared.changed_params,
        )
        await self._commit(call, response, answer, judge(answer, around), http_status=200)
        call.attempt.remember(call.call_id, answer.tool_call_ids)

    async def failure(self, call: Call, refused: CallRefused) -> None:
        """The error that the harness gets, with what had come of an answer before it."""
        partial = call.partial_answer()
        reason = refused.reason if partial is None else "cut"
        said = call.dialect.render(call.request, partial) if partial is not None else {}
        response = {**said, **call.dialect.error(refused)}
        await self._commit(call, response, partial, Verdict(False, reason, ()), http_status=refused.http_status)
        if refused.infrastructure:
            await self.note_failure(call.attempt, refused, call.call_id)

    async def cut(self, call: Call) -> None:
        """The harness left before its answer was whole."""
        partial = call.partial_answer()
        response = call.dialect.render(call.request, partial) if partial is not None else {}
        await self._commit(call, response, partial, Verdict(False, "cut", ()), http_status=499)

    async def note_failure(self, attempt: Attempt, refused: CallRefused, call_id: str | None = None) -> None:
        """Tell the controller that a call could not be served through no fault of the agent."""
        self._metrics.upstream_failures += 1
        data = {"call_id": call_id, "http_status": refused.http_status, "message": refused.what}
        logger.warning("rollout %s attempt %s: %s", attempt.rollout_id, attempt.attempt_id, refused.what)
        try:
            await self._store.add_event(attempt.rollout_id, attempt.attempt_id, FAILURE_EVENT, data)
        except NotFoundError:
            logger.info("rollout %s was deleted meanwhile", attempt.rollout_id)

    async def _commit(
        self, call: Call, response: Json, answer: Answer | None, verdict: Verdict, *, http_status: int
    ) -> None:
        none = np.empty(0, np.int32)
        prompt_ids = none if answer is None or answer.prompt_ids is None else answer.prompt_ids
        sampled_ids = none if answer is None or answer.sampled_ids is None else answer.sampled_ids
        logprobs = answer.logprobs if answer is not None else None
        commit = Commit(
            call_id=call.call_id,
            response=response,
            prompt_ids=prompt_ids,
            sampled_ids=sampled_ids,
            logprobs=np.empty(0, np.float32) if logprobs is None else logprobs,
            spans=verdict.spans,
            trainable=verdict.trainable,
            reason=verdict.reason,
            finish_reason=answer.finish_reason if answer is not None else None,
            http_status=http_status,
            upstream=call.reply.model if call.reply is not None else None,
            latency_ms=call.latency_ms(),
            retry_count=call.reply.retries if call.reply is not None else 0,
            usage=answer.usage if answer is not None else {},
            side={
                "dialect": dict(call.request.side),
                "tool_call_ids": list(answer.tool_call_ids) if answer is not None else [],
            },
        )
        try:
            await self._store.commit_call(commit)
        except ConflictError as error:
            raise sealed(call.attempt.attempt_id) from error
        except NotFoundError as error:
            raise CallRefused(error.what, status=404) from error
        self._metrics.calls += 1
        self._metrics.call_s += commit.latency_ms / 1000
        self._metrics.prompt_tokens += prompt_ids.size
        self._metrics.sampled_tokens += sampled_ids.size
