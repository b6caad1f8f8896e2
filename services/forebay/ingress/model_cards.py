"""Read the model card of a model directory, and open a model from the files of a stored card."""

import shutil
import weakref
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp

from forebay import runtime
from forebay.events.models import ModelCard, ModelFile
from forebay.events.names import printable
from forebay.ingress.model import (
    GENERATION_FILE,
    IMAGE_PROCESSOR_FILE,
    NAMED_TEMPLATE_FILES,
    PROCESSOR_FILE,
    PROCESSOR_TEMPLATE_FILE,
    TEMPLATE_FILE,
    VIDEO_PROCESSOR_FILE,
    InvalidModel,
    Model,
    card_of,
)
from forebay.transport.models import FILE_BYTES_MAX, ModelStore

# Files that an ingress or a mock engine reads.
TOKENIZER_FILES = (
    *NAMED_TEMPLATE_FILES.values(),
    TEMPLATE_FILE,
    PROCESSOR_TEMPLATE_FILE,
    "config.json",
    GENERATION_FILE,
    PROCESSOR_FILE,
    IMAGE_PROCESSOR_FILE,
    VIDEO_PROCESSOR_FILE,
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def read_card(directory: Path, context_tokens: int | None = None) -> tuple[ModelCard, dict[str, bytes]] | None:
    """Return the card of a model directory, by default with its context length, and the content of its files.

    None without a tokenizer.json, or if the files exceed `FILE_BYTES_MAX`. Raises InvalidModel if a file is invalid.
    """
    files = {name: (directory / name).read_bytes() for name in TOKENIZER_FILES if (directory / name).is_file()}
    if "tokenizer.json" not in files or sum(map(len, files.values())) > FILE_BYTES_MAX:
        return None
    listed = tuple(
        ModelFile(name=name, sha256=sha256(content).hexdigest(), size=len(content)) for name, content in files.items()
    )
    return card_of(directory, listed, context_tokens), files


async def open_model(store: ModelStore, digest: str, folder: Path) -> Model:
    """Return the model of a stored card. Its files are in a new directory in `folder`, which is removed with the model.

    Raises InvalidModel if the files are unusable, LogError if the card is missing or damaged, or the log fails.
    """
    stored = store.cards.get(digest)
    files = await store.load(digest)
    if unknown := sorted(files.keys() - set(TOKENIZER_FILES)):
        raise InvalidModel(
            f"the model card {digest} has unknown files: {', '.join(map(printable, unknown))}; "
            "serve it with the version of forebay that stored it"
        )

    def opened() -> Model:
        directory = None
        try:
            directory = Path(mkdtemp(prefix=f"{digest[:16]}-", dir=folder))
            for name, content in files.items():
                path = directory / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
            model = Model(directory, stored.card.context_tokens if stored else None)
        except Exception as error:  # a card may hold anything
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, InvalidModel):
                raise
            raise InvalidModel(f"the model card {digest} cannot be loaded: {error!r}") from error
        weakref.finalize(model, shutil.rmtree, directory, ignore_errors=True)
        return model

    return await runtime.offload(opened)
