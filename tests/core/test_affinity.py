"""Sessions: bound, moved, ended, bounded; against a plain dict."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.core.state.sessions import Binding, SessionAffinity

A = Binding("a", 1, 0)
B = Binding("b", 2, 1)


def restored(affinity: SessionAffinity, sessions_max: int = 1 << 20) -> SessionAffinity:
    copy = SessionAffinity(sessions_max)
    for chunk in affinity.snapshot():
        copy.restore(chunk)
    return copy


def test_a_session_stays_until_it_ends() -> None:
    affinity = SessionAffinity()
    assert not affinity.bind("p", "s", A, 100)
    affinity.expire(99)
    assert affinity.find("p", "s") == A
    assert affinity.find("q", "s") is None
    assert affinity.find("p", "t") is None
    affinity.bind("p", "s", A, 150)
    affinity.expire(149)
    assert affinity.find("p", "s") == A
    affinity.expire(150)
    assert affinity.find("p", "s") is None
    assert (len(affinity), affinity.digest()) == (0, 0)


def test_a_session_can_be_rebound() -> None:
    affinity = SessionAffinity()
    affinity.bind("p", "s", A, 100)
    affinity.bind("p", "s", B, 100)
    assert affinity.find("p", "s") == B
    affinity.drop_worker("a")
    assert affinity.find("p", "s") == B
    affinity.drop_worker("b")
    assert affinity.find("p", "s") is None
    assert affinity.digest() == 0


def test_the_least_recently_used_session_is_evicted_at_the_limit() -> None:
    affinity = SessionAffinity(sessions_max=2)
    affinity.bind("p", "s", A, 100)
    affinity.bind("p", "t", A, 101)
    assert not affinity.bind("p", "s", A, 102)
    assert affinity.bind("p", "u", B, 103)
    assert [affinity.find("p", name) for name in "stu"] == [A, None, B]


MAX = 4
operations = st.tuples(
    st.sampled_from(["bind", "bind", "bind", "bind", "wait", "lose"]),
    st.integers(0, 6),
    st.sampled_from([A, A._replace(rank=1), B]),
    st.integers(1, 30),
)


@given(st.lists(operations, max_size=80))
def test_sessions_equal_a_plain_dict(history: list[tuple[str, int, Binding, int]]) -> None:
    affinity, plain = SessionAffinity(MAX), dict[tuple[str, str], tuple[Binding, int]]()
    now_us = 0
    for number, (kind, name, binding, us) in enumerate(history):
        if number == len(history) // 2:
            affinity = restored(affinity, MAX)
        now_us += us * 128 if kind == "wait" else 0
        affinity.expire(now_us)
        plain = {session: bound for session, bound in plain.items() if bound[1] > now_us}
        if kind == "bind":
            # Ends of sessions that could be pushed out differ: of equal ones their hashes decide.
            session, due_us = (f"p{name % 2}", f"s{name}"), now_us + us * 128 + number
            full = session not in plain and len(plain) == MAX
            if full:
                del plain[min(plain, key=lambda one: plain[one][1])]
            plain[session] = (binding, due_us)
            assert affinity.bind(*session, binding, due_us) is full
        elif kind == "lose":
            affinity.drop_worker(binding.worker_id)
            plain = {one: bound for one, bound in plain.items() if bound[0].worker_id != binding.worker_id}
        for at in range(7):
            found = plain.get((f"p{at % 2}", f"s{at}"))
            assert affinity.find(f"p{at % 2}", f"s{at}") == (found[0] if found else None)
        assert len(affinity) == len(plain)
    copy = restored(affinity)
    assert copy.digest() == affinity.digest()
    assert list(copy.snapshot()) == list(affinity.snapshot())
    copy.expire(1 << 62)
    assert (len(copy), copy.digest()) == (0, 0)


def test_evicted_blocks_do_not_reappear() -> None:
    affinity = SessionAffinity()
    affinity.bind("p", "old", B, 10_000)
    for number in range(500):
        affinity.bind("p", f"s{number}", A, 1_000 + number)
        affinity.drop_worker("a")
    affinity.expire(9_999)
    assert affinity.find("p", "old") == B
    affinity.expire(10_000)
    assert len(affinity) == 0
