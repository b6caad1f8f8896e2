"""What another configuration would have chosen at the stages of a request, in history's own state."""

import msgspec

from forebay.core.routing.counterfactual import Counterfactual, counterfactual
from forebay.core.routing.plan import Plan
from forebay.events.control import RouterConfig
from forebay.events.progress import TransferFailed
from tests.core.disaggregated import prefilled, progress_fields
from tests.core.worlds import PROMPTS, Driver, request


def test_history_agrees_with_itself_at_every_stage() -> None:
    drive = Driver().disagg(("p", "q"), ("d", "e"), session_ttl_s=10.0)
    found: list[tuple[str, Counterfactual, Counterfactual]] = []

    def look(plan: Plan) -> None:
        other = msgspec.structs.replace(plan.pool, router=RouterConfig(mode="round-robin", session_ttl_s=10.0))
        ours, theirs = (counterfactual(drive.world, one, plan) for one in (plan.pool, other))
        found.append((plan.stage, ours, theirs))

    drive.world.on_plan = look
    for number in range(4):
        (first,) = drive("requests", request(f"r{number}", PROMPTS[0]))
        (then,) = prefilled(drive, first)
        _, again = drive("progress", TransferFailed(**progress_fields(then), error="gone"))
        assert again.stage == "prefill"
        prefilled(drive, again)
    assert [stage for stage, _, _ in found].count("decode") == 8
    assert all(ours.agrees for _, ours, _ in found)
    assert not all(theirs.agrees for _, _, theirs in found)
    assert all(theirs.choice is not None for _, _, theirs in found)


def test_a_prefill_worker_has_no_active_blocks_under_another_configuration_either() -> None:
    drive = Driver().disagg(("p",), ("d",))
    drive("requests", request("r0", PROMPTS[0]))
    found: list[Counterfactual] = []
    drive.world.on_plan = lambda plan: found.append(
        counterfactual(drive.world, msgspec.structs.replace(plan.pool, router=RouterConfig()), plan)
    )
    drive("requests", request("r1", PROMPTS[1]))
    (one,) = found
    assert one.choice is not None
    assert one.choice.table.terms(0).decode_blocks == 0.0
