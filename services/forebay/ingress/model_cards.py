"""Read the model card of a model directory, and open a model from the files of a stored card."""

from hashlib import sha256
from pathlib import Path

from forebay import runtime
from forebay.events.models import ModelCard, ModelFile
from forebay.ingress.model import Model, context_tokens_of, read_json
from forebay.transport.models import FILE_BYTES_MAX, ModelStore

# Files that an ingress or a mock engine reads.
TOKENIZER_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def read_card(directory: Path) -> tuple[ModelCard, dict[str, bytes]] | None:
    """Return the card of a model directory and the content of its files, or None if it has no tokenizer.json.

    Raises:
        ModelUnusable: a file is not valid.
    """
    files = {name: (directory / name).read_bytes() for name in TOKENIZER_FILES if (directory / name).is_file()}
    if "tokenizer.json" not in files or max(map(len, files.values())) > FILE_BYTES_MAX:
        return None
    config = read_json(directory / "config.json")
    listed = tuple(
        ModelFile(name=name, sha256=sha256(content).hexdigest(), size=len(content)) for name, content in files.items()
    )
    dtype = config.get("dtype", config.get("torch_dtype"))
    card = ModelCard(
        files=listed,
        context_tokens=context_tokens_of(config),
        dtype=dtype if isinstance(dtype, str) else "",
        revision=directory.name if directory.parent.name == "snapshots" else "",  # in the cache of the Hub
    )
    return card, files


async def open_model(store: ModelStore, digest: str, folder: Path) -> Model:
    """Load the files of a stored card into a new directory in `folder`, and return the model.

    Raises:
        ModelUnusable: the model cannot be loaded from the files of the card.
        LogError: the card is missing or damaged, or the log cannot be read.
    """
    files = await store.load(digest)

    def opened() -> Model:
        directory = folder / digest
        directory.mkdir(exist_ok=True)
        for name, content in files.items():
            (directory / Path(name).name).write_bytes(content)  # a card cannot name a file elsewhere
        return Model(directory)

    return await runtime.offload(opened)
