"""Lines about the verification of scaling decisions, for `forebay planner status`, `verify` and `record`."""

from collections.abc import Iterator

from forebay.replay.scaling.journal import ScalingVerification


def verification_lines(verification: ScalingVerification) -> Iterator[str]:
    """Yield lines about the second derivation of decisions."""
    parts = [f"{verification.equal:,} of {verification.decisions:,} decisions derived again: equal"]
    if verification.stale:
        parts.append(f"{verification.stale:,} stale, without effect")
    if verification.other_rules:
        parts.append(f"{verification.other_rules:,} by rules of another version, not derived again")
    if verification.undecodable:
        parts.append(f"{verification.undecodable:,} records do not decode")
    yield f"scaling    {', '.join(parts)}"
    if verification.different:
        yield f"DIFFERENT  {verification.different:,} decisions do not follow from the records before them"
    for one in verification.first:
        for name, values in one.differs.items():
            yield f"  {one.offset}: {name}: recorded {values['recorded']}, derived {values['derived']}"
