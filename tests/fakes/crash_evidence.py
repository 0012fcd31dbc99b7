"""What is seen of a run from outside while it is killed, and what its store must prove at the end."""

from __future__ import annotations

import contextlib
import hashlib
import re
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from agl_runtime.part import STORE_FILE
from agl_runtime.schemas import TERMINAL_STATES, PolicyVersion, Rollout, RolloutState
from agl_runtime.store.base import Store
from agl_runtime.store.sqlite import open_store


@dataclass
class Evidence:
    """What was seen from outside while the run went on."""

    notes: list[dict[str, Any]]
    rollouts: set[str] = field(default_factory=set)
    committed: set[str] = field(default_factory=set)

    def look(self, state_dir: Path) -> None:
        """Take down what the store holds now; nothing while the store is between two gateways."""
        try:
            with contextlib.closing(sqlite3.connect(f"file:{state_dir / STORE_FILE}?mode=ro", uri=True)) as db:
                self.rollouts |= {row[0] for row in db.execute("SELECT rollout_id FROM rollouts")}
                self.committed |= {row[0] for row in db.execute("SELECT call_id FROM calls WHERE commit_seq >= 0")}
        except sqlite3.OperationalError:
            return

    async def faults(self, state_dir: Path) -> tuple[list[str], dict[str, Any]]:
        """Sentences about all that is wrong with the store at the end of the run, and counts of what was examined."""
        self.look(state_dir)
        store = open_store(state_dir / STORE_FILE)
        try:
            found = await store.list_rollouts(list(RolloutState), 10**9)
            told = [f"rollout {name} is lost" for name in self.rollouts - {item.rollout_id for item in found}]
            told += [fault for item in found for fault in await _without_an_end(store, item)]
            seen, counts = await self._calls(store, found)
            trained, consumed = await self._trained(store)
        finally:
            await store.close()
        told += seen + trained + _reused_versions(state_dir)
        ended = Counter(str(item.status.error_message or "rewarded").split(":")[0][:60] for item in found)
        return told, {"rollouts": len(found), "ended": dict(ended), **counts, **consumed}

    async def _calls(self, store: Store, found: list[Rollout]) -> tuple[list[str], dict[str, Any]]:
        """Calls that were committed, and answers that agents saw, against those in the store."""
        committed: set[str] = set()
        said: dict[tuple[str, str], dict[str, str]] = {}
        unanswered: set[tuple[str, str]] = set()
        places = [(item.rollout_id, attempt) for item in found for attempt in await store.attempts(item.rollout_id)]
        for place in places:
            calls = await store.calls(*place)
            committed |= {call.info.call_id for call in calls if call.info.committed}
            responses = [call.response for call in calls if call.response and "id" in call.response]
            said[place] = {response["id"]: _digest(response) for response in responses}
            if not all(call.info.committed and call.info.http_status == 200 for call in calls):
                unanswered.add(place)
        told = [f"call {name} was committed and is lost" for name in self.committed - committed]
        for note in self.notes:
            place = note["rollout"], note["attempt"]
            digest = said.get(place, {}).get(note["id"])
            if note["whole"] and digest != note["digest"]:
                told.append(f"an agent of {place} saw answer {note['id']}, and the store does not have it")
            elif not note["whole"] and digest is None and place not in unanswered:
                told.append(f"an agent of {place} saw the beginning of {note['id']}, and nothing says so")
        return told, {
            "calls": len(committed),
            "answers_seen": len(self.notes),
            "partly_seen": sum(not note["whole"] for note in self.notes),
            "further_attempts": len(places) - len(found),
        }

    async def _trained(self, store: Store) -> tuple[list[str], dict[str, Any]]:
        """What the checkpoints consumed: disjoint, there, and each update on top of the one before."""
        records = await store.checkpoints()
        updates = [PolicyVersion.parse(record.version).updates for record in records]
        names = [name for record in records for name in record.rollout_ids]
        told = [f"{name} was trained {count} times" for name, count in Counter(names).items() if count > 1]
        told += [f"{name} was trained and is not in the store" for name in set(names) - self.rollouts]
        if updates != list(range(1, len(updates) + 1)):
            told.append(f"the checkpoints are not one lineage: their updates are {updates}")
        return told, {"updates": len(updates), "trained": len(names)}


async def _without_an_end(store: Store, rollout: Rollout) -> list[str]:
    if rollout.status.state not in TERMINAL_STATES:
        return [f"rollout {rollout.rollout_id} has not ended"]
    rewarded = any(event.event_type == "reward" for event in await store.events(rollout.rollout_id))
    if rewarded or rollout.status.error_message:
        return []
    return [f"rollout {rollout.rollout_id} has neither a reward nor a reason"]


def _digest(response: dict[str, Any]) -> str:
    text = "".join(choice["message"]["content"] or "" for choice in response.get("choices", ()))
    return hashlib.sha256(text.encode()).hexdigest()


def _reused_versions(state_dir: Path) -> list[str]:
    """Every trainer that served had a run epoch of its own, later than all before it."""
    log = (state_dir / "logs/trainer.log").read_text(encoding="utf-8")
    begun = [int(epoch) for epoch in re.findall(r"serving version (\d+)\.\d+ at", log)]
    return [f"run epoch {after} followed {before}" for before, after in pairwise(begun) if after <= before]
