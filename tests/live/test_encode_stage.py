"""The encode stage in a live owner: pools by lease, work items of both stages, and a takeover between them."""

from dataclasses import replace

import msgspec

from forebay.events.codec import decode
from forebay.events.decisions import RequestRouted
from forebay.events.fleet import WorkerSpec
from forebay.events.media import Encoded
from forebay.events.topics import work_topic
from forebay.events.work import WorkItem
from forebay.live.owner.effects import WorkerAddress, encode_work
from tests.core.worlds import ENCODED, MEDIA, PROMPTS, Driver, request

ANSWERS = WorkerSpec(
    worker_id="w", model="m", block_size=4, kv_blocks_total=8, max_num_seqs=4, max_num_batched_tokens=64
)
ENCODES = msgspec.structs.replace(ANSWERS, worker_id="e", pool="encoders", role="encode", block_size=1)


def work_of(drive: Driver, decided: RequestRouted, result: Encoded | None) -> WorkItem:
    submission = request("r", PROMPTS[0], media=(MEDIA,))
    active = drive.world.requests.get("r")
    assert active is not None
    one = replace(active, encoded=result)
    to = WorkerAddress(ANSWERS.model, decided.pool, decided.slot, decided.worker_id, decided.worker_epoch)
    draft = encode_work(to, one, decided.owner_epoch, submission, report_output=False)
    assert (draft.topic, draft.partition) == (work_topic(decided.pool).name, decided.slot)
    item: WorkItem = decode(work_topic(decided.pool), draft.value)
    return item


def test_each_stage_gets_only_its_own_inputs() -> None:
    drive = Driver().fleet("a", "b").encoders("e")
    first = drive.ask(media=(MEDIA,))
    item = work_of(drive, first, None)
    assert (item.stage, item.media, item.token_ids, item.sequence_hashes) == ("encode", (MEDIA,), b"", b"")
    (main,) = drive.encoded(first)
    item = work_of(drive, main, ENCODED)
    assert (item.stage, item.encoded, len(item.token_ids)) == ("aggregated", ENCODED, 34 * 4)
    assert item.media == (msgspec.structs.replace(MEDIA, content=b""),)
    alone = work_of(drive, main, None)
    assert (alone.encoded, alone.media) == (None, (MEDIA,)), "an aggregated worker encodes by itself"


def test_a_new_owner_resends_the_unfinished_stage() -> None:
    drive = Driver().fleet("a", "b").encoders("e", "f")
    first = drive.ask(media=(MEDIA,))
    submission = request("r", PROMPTS[0], media=(MEDIA,))

    def resent() -> WorkItem:
        one = drive.world.requests.get("r")
        assert one is not None
        worker = drive.world.fleet.get(one.worker_id)
        assert worker is not None
        to = WorkerAddress(ANSWERS.model, worker.spec.pool, worker.slot, one.worker_id, one.worker_epoch)
        draft = encode_work(to, one, 9, submission, report_output=False)
        item: WorkItem = decode(work_topic(worker.spec.pool), draft.value)
        assert draft.topic == work_topic(worker.spec.pool).name
        return item

    assert (resent().stage, resent().attempt, resent().owner_epoch) == ("encode", 1, 9)
    (main,) = drive.encoded(first)
    assert (resent().stage, resent().attempt, resent().encoded) == ("aggregated", main.attempt, ENCODED)
