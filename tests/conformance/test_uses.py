"""The checker itself: each kind of change of an engine's package is reported for an adapter that uses the package."""

from pathlib import Path

import msgspec
import pytest

from tests.conformance.interface import Package
from tests.conformance.uses import Adapter, differences

ENGINE = """
SETTING = "block_size"

class Base:
    def step(self, batch): ...
    @abstractmethod
    def close(self): ...

class Llm:
    model: "Config"
    def generate(self, prompt, priority=0): ...

class Config:
    length: int

class Params:
    def __init__(self, *, seed=None): ...

class KVCacheEvent: ...

class Stored(KVCacheEvent):
    hashes: list[int]
    session: str | None = None
"""
ADAPTER = '''
from engine.api import Base, Llm, Params

class Own(Base):
    def step(self, batch): ...
    def close(self): ...

def use(llm: Llm) -> int:
    llm.generate([1], priority=Params(seed=2))
    return llm.model.length
'''  # fmt: skip


class Stored(msgspec.Struct, tag=True):
    hashes: list[int]


def found(folder: Path, engine: str) -> list[str]:
    (folder / "engine").mkdir()
    (folder / "engine/api.py").write_text(engine)
    (folder / "adapter.py").write_text(ADAPTER)
    adapter = Adapter(
        package="engine",
        files=[folder / "adapter.py"],
        keywords=[("engine.api:Llm.generate", ["priority"])],
        strings={"engine.api": ["block_size"]},
        events=("engine.api", [Stored], ["session"]),
    )
    return [one.partition(".py:")[2].partition(": ")[2] or one for one in differences(adapter, Package(folder))]


def test_an_engine_that_has_all_names_has_no_differences(tmp_path: Path) -> None:
    assert not found(tmp_path, ENGINE)


@pytest.mark.parametrize(
    ("old", "new", "report"),
    [
        ("class Params", "class Parameters", "engine.api:Params does not exist"),
        ("length: int", "size: int", "engine.api:Config has no length"),
        ("def generate", "def submit", "engine.api:Llm has no generate"),
        ("priority=0", "order=0", "engine.api:Llm.generate has no argument priority"),
        ("priority=0", "priority, salt", "engine.api:Llm.generate requires salt"),
        ("seed=None", "random=None", "engine.api:Params has no argument seed"),
        ("step(self, batch)", "step(self, batch, budget=0)", "engine.api:Base.step has a new argument: budget"),
        ("@abstractmethod", "@abstractmethod\n    def open(self): ...\n    @abstractmethod",
         "engine.api:Base has a new abstract method: open"),
        ('"block_size"', '"page_size"', "engine.api does not contain 'block_size'"),
        ("hashes: list[int]", "names: list[int]", "engine.api:Stored has no field hashes"),
        ("hashes: list[int]", "hashes: list[int]\n    salt: str = ''", "engine.api:Stored has a new field: salt"),
        ("class Stored(", "class Moved(KVCacheEvent): ...\nclass Stored(", "engine.api has a new event: Moved"),
    ],
)  # fmt: skip
def test_a_change_of_the_engine_is_reported(tmp_path: Path, old: str, new: str, report: str) -> None:
    assert old in ENGINE
    assert report in found(tmp_path, ENGINE.replace(old, new))
