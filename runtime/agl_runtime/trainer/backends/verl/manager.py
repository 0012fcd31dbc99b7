"""verl's agent-loop manager in agl: a batch of tasks becomes groups in the gateway, complete groups become rows.

verl makes it by `create` and calls `generate_sequences`, which returns once the rollouts are enqueued. Everything else
goes on in one thread with an event loop of its own: waiting for ended rollouts, building samples, putting the rows of
whole groups into TransferQueue. When verl asks for rollouts its servers have the weights of that step, so this is also
where the gateway learns their version and lets held calls go; it holds them again at the end of `GroupSampler.sample`.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import ray
import transfer_queue
from pydantic import SecretStr
from transformers import AutoTokenizer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from agl_runtime.errors import AglError
from agl_runtime.samples.build import build_samples
from agl_runtime.samples.types import Limits, RolloutSamples, Sample
from agl_runtime.schemas import Model, PolicyVersion
from agl_runtime.trainer.backends.verl.estimators import WITHOUT_GROUPS
from agl_runtime.trainer.backends.verl.families import read_family
from agl_runtime.trainer.backends.verl.images import Inputs, eye_of, has_images, row_fields, see
from agl_runtime.trainer.backends.verl.records import GroupRecord
from agl_runtime.trainer.backends.verl.routing import routed_only, routing_field
from agl_runtime.trainer.backends.verl.rows import ScoredSamples, group_rows
from agl_runtime.trainer.backends.verl.servers import watch
from agl_runtime.trainer.backends.verl.setup import SERVER_KEY, Ending, Setup
from agl_runtime.trainer.checks import training_tasks, validation_tasks
from agl_runtime.trainer.evaluation import evaluate
from agl_runtime.trainer.metrics import validation_line
from agl_runtime.trainer.rollouts import Ended, RolloutDesk, Work, is_orphan, of_lineage, recipe


class Prompt(NamedTuple):
    """A row of verl's batch: one group, by verl's name for it and by its number in the order of the tasks."""

    uid: str
    number: int


class GatewayManager:
    """Made by verl, see `create`. `addresses` are its rollout servers', host:port."""

    def __init__(self, setup: Setup, addresses: Sequence[str]) -> None:
        config = setup.project.config
        self._setup = setup
        self._config = config
        self._tasks = training_tasks(setup.project)
        self._val_tasks = validation_tasks(setup.project)
        self._recipe = recipe(config)
        self._begun = PolicyVersion(setup.run_epoch, setup.step)
        self._born = {number: PolicyVersion.parse(version) for number, version in setup.open}
        self._limits = Limits(config.train.max_prompt_tokens, config.train.max_response_tokens)
        policy = setup.project.path(str(config.model.path))
        self._tokenizer = AutoTokenizer.from_pretrained(policy)
        self._eye = eye_of(policy)
        self._routing = read_family(policy).routing if config.train.routing_replay else None
        self._addresses = addresses
        self._endpoints = [f"http://{address}/v1" for address in addresses]
        self._client = setup.client()
        self._desk = RolloutDesk(self._client, config.agent.timeout_s)
        self._loop = asyncio.new_event_loop()
        self._going: set[Future[None]] = set()
        threading.Thread(target=self._loop.run_forever, name="agl", daemon=True).start()

    @classmethod
    def create(cls, config: Any, llm_client: Any, **_: Any) -> GatewayManager:
        """verl's constructor. `llm_client` knows the servers by their balancer."""
        setup = Setup.read(config.trainer.v1.sampler.sampler_kwargs.setup)
        manager = cls(setup, ray.get(llm_client._load_balancer.get_all_servers.remote()))
        manager._wait(manager._open())
        return manager

    def generate_sequences(self, prompts: Any) -> None:
        """Enqueue the groups of a batch (a TensorDict with uid and index of each row, and global_steps)."""
        is_val = "validate" in prompts and bool(prompts["validate"])
        rows = [Prompt(str(uid), int(n)) for uid, n in zip(list(prompts["uid"]), list(prompts["index"]), strict=True)]
        step = int(prompts["global_steps"])
        self._wait(self._validate(rows, step) if is_val else self._train(rows, step))

    async def _open(self) -> None:
        await self._client.__aenter__()  # for as long as this process lives
        await self._desk.open()
        carried = {self._work(number, version, self._setup.step + 1).group_id for number, version in self._born.items()}
        run_id, version = self._setup.run_id, self._setup.weights(self._setup.step)
        await self._desk.cancel(lambda rollout: is_orphan(rollout, run_id, version, self._recipe, carried))
        self._spawn(self._desk.watch())
        self._spawn(watch(self._addresses))

    async def _train(self, prompts: Sequence[Prompt], step: int) -> None:
        await self._serve(step - 1)
        version = self._setup.weights(step - 1)
        works = [self._work(n, self._born.pop(n, version), step) for _, n in prompts]
        tags = [
            {
                "status": "running",
                "number": n,
                "version": str(work.version),
                "born": work.version.updates + 1,  # verl dates a group that it took up again after a resume anew
                "rollouts": list(work.rollout_ids),
            }
            for (_, n), work in zip(prompts, works, strict=True)
        ]
        await self._put("train", [uid for uid, _ in prompts], tags=tags)
        self._setup.tell("dispatched", step=step, numbers=[n for _, n in prompts])
        await self._desk.enqueue(works)
        for prompt, work in zip(prompts, works, strict=True):
            self._spawn(self._follow(prompt, work))

    async def _validate(self, prompts: Sequence[Prompt], step: int) -> None:
        await self._serve(step)
        version = self._setup.weights(step)
        works = [
            Work(self._setup.run_id, version, f"val{n}", self._val_tasks[n], self._config.eval.samples, step, False,
                 self._recipe)
            for _, n in prompts
        ]  # fmt: skip
        self._setup.tell("validating", step=step, rollouts=sum(work.size for work in works))
        await self._desk.enqueue(works)
        self._spawn(self._measure(prompts, works, version, step))

    async def _serve(self, step: int) -> None:
        """Tell the gateway which weights its model servers have, and let held calls go."""
        key = os.environ.get(SERVER_KEY)
        models = [
            Model(
                model=self._config.model.name,
                endpoint=endpoint,
                version=step,
                run_epoch=self._setup.run_epoch,
                api_key=SecretStr(key) if key else None,
            )
            for endpoint in self._endpoints
        ]
        for model in models:
            await self._client.register_model(model)
        await self._client.resume()
        self._setup.tell("serving", step=step, models=[model.model_dump(mode="json") for model in models])

    async def _follow(self, prompt: Prompt, work: Work) -> None:
        ended = await self._desk.results(work)
        if prompt.uid not in (await asyncio.to_thread(transfer_queue.kv_list, "train")).get("train", {}):
            return  # it was dropped, and its rows would stay for ever
        built, inputs = await self._build(ended)
        record = GroupRecord.of(prompt.uid, prompt.number, str(work.version), ended, built)
        teaches = record.teaches(flat_trains=self._config.train.algorithm in WITHOUT_GROUPS)
        rewards = [item.reward for item in ended]
        status = await self._deliver(prompt.uid, rewards, built, inputs, work.step, validate=False)
        self._setup.tell("group", **record.event())
        await self._put("train", [prompt.uid], tags=[{"status": status, "teaches": teaches}])

    async def _measure(
        self, prompts: Sequence[Prompt], works: Sequence[Work], version: PolicyVersion, step: int
    ) -> None:
        began = time.monotonic()
        groups = await asyncio.gather(*(self._desk.results(work) for work in works))
        everyone = [item for group in groups for item in group]
        rewards = {
            work.task.task_id: [item.reward for item in group if item.reward is not None]
            for work, group in zip(works, groups, strict=True)
        }
        result = evaluate(rewards)
        line = validation_line(step, version, result, everyone, time.monotonic() - began) if result else None
        self._setup.tell("validation", step=step, line=line)
        for prompt, group in zip(prompts, groups, strict=True):
            built, inputs = await self._build(group)
            told = [item.reward if result else 0.0 for item in group]  # verl cannot do without any
            status = await self._deliver(prompt.uid, told, built, inputs, step, validate=True)
            await self._put("val", [prompt.uid], tags=[{"status": status}])

    async def _deliver(
        self,
        uid: str,
        rewards: Sequence[float | None],
        built: Sequence[RolloutSamples],
        inputs: Mapping[int, Inputs],
        step: int,
        *,
        validate: bool,
    ) -> str:
        """Put the rows of a group, of which there are none when no rollout has a reward."""
        scored = [
            ScoredSamples(index, reward, samples)
            for index, (reward, samples) in enumerate(zip(rewards, built, strict=True))
            if reward is not None
        ]
        if not scored:
            return "failure"
        flat_trains = self._config.train.algorithm in WITHOUT_GROUPS

        def besides(sample: Sample) -> Mapping[str, Any]:
            seen = row_fields(self._eye, sample, inputs.get(id(sample), {})) if self._eye else {}
            return seen | (routing_field(sample, self._routing) if self._routing else {})

        rows = group_rows(uid, scored, step, validate=validate, flat_trains=flat_trains, besides=besides)
        fields = list_of_dict_to_tensordict(list(rows.fields))
        await self._put("val" if validate else "train", rows.keys, fields=fields, tags=list(rows.tags))
        return "finished"

    async def _build(self, ended: Sequence[Ended]) -> tuple[list[RolloutSamples], dict[int, Inputs]]:
        """The samples of each rollout; and of those in which there are images what the model sees, see `images.see`."""
        built = await asyncio.to_thread(self._samples, ended)
        inputs: dict[int, Inputs] = {}
        if self._eye is None:
            return built, inputs
        for index, (item, samples) in enumerate(zip(ended, built, strict=True)):
            if not has_images(self._eye, samples.samples):
                continue
            events = await self._client.events(item.rollout_id, event_type="model_request")
            messages = {event.data["call_id"]: event.data["request"].get("messages", ()) for event in events}
            built[index], seen = await asyncio.to_thread(see, self._eye, samples, messages)
            inputs |= seen
        return built, inputs

    def _samples(self, ended: Sequence[Ended]) -> list[RolloutSamples]:
        def decode(ids: Sequence[int]) -> str:
            return str(self._tokenizer.decode(list(ids)))

        built = [build_samples(of_lineage(item.calls, self._begun), self._limits, decode) for item in ended]
        return [routed_only(samples, self._routing) for samples in built] if self._routing else built

    async def _put(self, partition: str, keys: Sequence[str], **what: Any) -> None:
        # TransferQueue's client has a loop of its own, which its blocking calls wait for.
        await asyncio.to_thread(transfer_queue.kv_batch_put, keys=list(keys), partition_id=partition, **what)

    def _work(self, number: int, version: PolicyVersion, step: int) -> Work:
        task = self._tasks.at(number)
        return Work(
            self._setup.run_id, version, str(number), task, self._config.train.group_size, step, True, self._recipe
        )

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """What fails there for good ends the run."""
        task = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._going.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: Future[None]) -> None:
        self._going.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            what, fix = (error.what, error.fix) if isinstance(error, AglError) else (repr(error), "See the log.")
            self._setup.ask_to_end(Ending(kind="failed", what=what, fix=fix))
