"""Batch sequence numbers: each once, in order, from one publisher; gaps are replayed or reported as lost."""

from collections import deque

from hypothesis import example, given
from hypothesis import strategies as st

from forebay.workers.kv_events.zmq_feed import FAILURES_MAX, Deliver, Lost, RequestReplay, Restarted, Sequence, Step


def batch(seq: int, publisher: int = 0) -> tuple[int, bytes]:
    return seq, b"%d of %d" % (seq, publisher)


def deliver(*seqs: int, publisher: int = 0) -> list[Step]:
    return [Deliver(*batch(seq, publisher)) for seq in seqs]


def started(*live: int, replays: bool = True, held_max: int = 8) -> Sequence:
    """Return a sequence with these batches, after an empty first replay."""
    sequence = Sequence(replays=replays, held_max=held_max)
    if replays:
        assert sequence.check() == [RequestReplay(0)]
        assert sequence.replay_ended() == []
    for seq in live:
        assert sequence.live(*batch(seq)) == deliver(seq)
    return sequence


def answer(sequence: Sequence, *seqs: int, publisher: int = 0) -> list[Step]:
    steps = [step for seq in seqs for step in sequence.replayed(*batch(seq, publisher))]
    return steps + sequence.replay_ended()


def test_unfilled_gap_is_lost() -> None:
    sequence = started(0)
    assert sequence.live(*batch(3)) == [RequestReplay(0)]
    [lost, *rest] = answer(sequence, 0)
    assert isinstance(lost, Lost) and "batches 1 to 2" in lost.reason and rest == deliver(3)
    assert sequence.check() == [RequestReplay(3)], "the publisher is known by its last batch again"


def test_gap_without_a_replay_socket_is_lost_at_once() -> None:
    sequence = started(0, replays=False)
    assert sequence.check() == []
    [lost, *rest] = sequence.live(*batch(2))
    assert isinstance(lost, Lost) and "replays are not available" in lost.reason and rest == deliver(2)
    [restarted, *rest] = sequence.live(*batch(0, 1))
    assert restarted == Restarted() and rest == deliver(0, publisher=1)


def test_restarted_numbers_mean_a_new_publisher() -> None:
    sequence = started(0, 1)
    assert sequence.live(*batch(0, 1)) == [Restarted(), RequestReplay(0)]
    assert sequence.live(*batch(1, 1)) == []
    assert answer(sequence, 0, 1, publisher=1) == deliver(0, 1, publisher=1)


def test_replay_with_a_different_batch_means_a_new_publisher() -> None:
    sequence = started(0, 1)
    assert sequence.check() == [RequestReplay(1)]
    assert sequence.replayed(*batch(1, 1)) == [Restarted(), RequestReplay(0)]
    assert answer(sequence, 0, 1, 2, publisher=1) == deliver(0, 1, 2, publisher=1)


def test_failed_replay_is_repeated_a_few_times() -> None:
    sequence = started(0)
    assert sequence.live(*batch(2)) == [RequestReplay(0)]
    for _ in range(FAILURES_MAX - 1):
        assert sequence.failed() == [RequestReplay(0)]
    [lost, *rest] = sequence.failed()
    assert isinstance(lost, Lost) and rest == deliver(2) and not sequence.asking


def test_silence_alone_loses_nothing() -> None:
    sequence = started(0)
    sequence.check()
    assert [sequence.failed() for _ in range(FAILURES_MAX)] == [[RequestReplay(0)]] * (FAILURES_MAX - 1) + [[]]
    assert sequence.live(*batch(1)) == deliver(1)


class Publisher:
    """A publisher and the network: live batches may be dropped, replays delayed, and the publisher replaced."""

    def __init__(self, keeps: int) -> None:
        self.keeps = keeps
        self.number = 0
        self.next_seq = 0
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=keeps)
        self.live: deque[tuple[int, bytes]] = deque()
        self.answer: deque[tuple[int, bytes] | None] = deque()

    def publish(self, dropped: bool) -> None:
        one = batch(self.next_seq, self.number)
        self.next_seq += 1
        self.buffer.append(one)
        if not dropped:
            self.live.append(one)

    def restart(self) -> None:
        self.number += 1
        self.next_seq = 0
        self.buffer.clear()
        self.live.clear()
        self.answer.clear()

    def ask(self, from_seq: int) -> None:
        self.answer = deque([*(one for one in self.buffer if one[0] >= from_seq), None])


class Reader:
    """Executes the steps and records the delivered batches."""

    def __init__(self, publisher: Publisher, replays: bool) -> None:
        self.publisher = publisher
        self.sequence = Sequence(replays=replays, held_max=3)
        self.announced: list[Deliver | Lost | Restarted] = []
        self.requested: int | None = None

    def do(self, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, RequestReplay):
                self.requested = step.from_seq
                self.publisher.answer.clear()
            else:
                self.announced.append(step)

    def live(self) -> None:
        if self.publisher.live:
            self.do(self.sequence.live(*self.publisher.live.popleft()))

    def serve(self) -> None:
        if self.requested is not None:
            self.publisher.ask(self.requested)
            self.requested = None

    def read_answer(self) -> None:
        if self.publisher.answer:
            one = self.publisher.answer.popleft()
            self.do(self.sequence.replay_ended() if one is None else self.sequence.replayed(*one))

    def restart(self) -> None:
        unanswered = self.sequence.asking
        self.publisher.restart()
        self.do(self.sequence.check())  # the connection was opened again
        if unanswered:
            self.requested = None
            self.do(self.sequence.failed())

    def settle(self) -> None:
        while self.publisher.live:
            self.live()
        self.do(self.sequence.check())
        while self.sequence.asking:
            self.serve()
            while self.publisher.answer:
                self.read_answer()


def check(announced: list[Deliver | Lost | Restarted], last: Publisher, complete: bool) -> None:
    due: int | None = 0
    publisher: bytes | None = None
    for one in announced:
        match one:
            case Deliver(seq, payload):
                by = payload.split(b" of ")[1]
                assert due is None or seq == due
                assert publisher is None or by == publisher, "batches of two publishers in one run"
                due, publisher = seq + 1, by
            case Lost():
                due, publisher = None, None
            case Restarted():
                due, publisher = 0, None
    assert due is None or due == last.next_seq or not complete
    assert publisher is None or publisher == b"%d" % last.number


actions = st.lists(
    st.sampled_from(["publish", "drop", "live", "serve", "answer", "quiet", "restart", "silent"]), max_size=60
)


@given(actions, st.integers(1, 6), st.booleans())
@example(["publish", "live", "restart", "publish", "publish"], 6, True)
def test_every_batch_is_delivered_once_in_order_or_lost(history: list[str], keeps: int, replays: bool) -> None:
    publisher = Publisher(keeps)
    reader = Reader(publisher, replays)
    reader.do(reader.sequence.check())
    lossless = True
    for action in history:
        match action:
            case "publish" | "drop":
                publisher.publish(action == "drop")
            case "live":
                reader.live()
            case "serve":
                reader.serve()
            case "answer":
                reader.read_answer()
            case "quiet":
                reader.do(reader.sequence.check())
            case "restart":
                if replays:
                    reader.restart()
            case "silent":
                if reader.sequence.asking:
                    reader.requested = None
                    publisher.answer.clear()
                    reader.do(reader.sequence.failed())
                    lossless = False
    reader.settle()
    lossless &= keeps >= publisher.next_seq and replays and "restart" not in history
    check(reader.announced, publisher, complete=replays)
    if replays:
        assert reader.sequence.next_seq == publisher.next_seq
    if lossless:
        assert reader.announced == deliver(*range(publisher.next_seq))
