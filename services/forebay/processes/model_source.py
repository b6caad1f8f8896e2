"""Value of `--model`: a model directory, or the name of a model on the Hugging Face Hub.

Theory of operation. A value that names a directory is that directory. Any other value of the form ORG/NAME is a model
on the Hub: `huggingface_hub` downloads its files into its cache, and the directory in the cache is used. The library's
environment variables apply: HF_ENDPOINT, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_TOKEN. If the Hub cannot be reached,
cached files are used. The library then returns every directory in its cache, also one with some of the files, so the
files of a model are checked here.
"""

import json
import logging
import re
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import httpx

from forebay.ingress.model import model_name_of
from forebay.ingress.model_cards import TOKENIZER_FILES
from forebay.runtime.errors import ConfigError

LOG = logging.getLogger(__name__)

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
REQUIRED_FILES = ("config.json", "tokenizer.json")
MODEL_FILES = ("*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "*.txt")  # everything but weights
SAFETENSORS = "*.safetensors"
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth")  # only of a model without safetensors
# The same weights in other formats.
COPIES = ("consolidated*", "flax_model*", "tf_model*", "onnx/*", "openvino/*", "original/*", "metal/*")


class ModelSource(NamedTuple):
    """Model that an option names; its directory is None if no model was named."""

    directory: Path | None
    name: str


def find_model(model: str | None, revision: str | None, name: str, *, weights: bool) -> ModelSource:
    """Return the model that the options name, and download it if it is on the Hub and not in the cache.

    An empty `name` selects the default: ORG/NAME, or the name of the directory. Raises ConfigError if there is no such
    model, it cannot be downloaded, or its name is invalid.
    """
    is_hub = model is not None and not Path(model).is_dir() and HUB_NAME.fullmatch(model) is not None
    if revision is not None and not is_hub:
        raise ConfigError(f"--revision {revision} requires --model ORG/NAME, a model on the Hugging Face Hub")
    if model is None:
        return ModelSource(None, model_name_of(None, name))
    if is_hub:
        called = model_name_of(None, name or model)
        return ModelSource(directory_of(model, f"--model {model}", revision, weights=weights, is_model=True), called)
    return ModelSource(directory_of(model, f"--model {model}", weights=weights), model_name_of(Path(model), name))


def directory_of(text: str, option: str, revision: str | None = None, *, weights: bool, is_model: bool = False) -> Path:
    """Return the directory of a model or an adapter, and download it if it is on the Hub and not in the cache.

    A `revision` of None selects the default branch. The cached files of an adapter (`is_model` false) are not checked.
    Raises ConfigError if `text` is neither a directory nor on the Hub, cannot be downloaded, or is cached only in part.
    """
    if Path(text).is_dir():
        return Path(text)
    missing = f"{option}: no such directory {text}"
    if HUB_NAME.fullmatch(text) is None:
        raise ConfigError(f"{missing}; expected a directory, or ORG/NAME for a model on the Hugging Face Hub")
    directory = _download(text, revision, missing, weights=weights, is_model=is_model)
    LOG.info("%s is at commit %s", text, directory.name)
    return directory


def _download(repository: str, revision: str | None, missing: str, *, weights: bool, is_model: bool) -> Path:
    # Imported here, because it takes half a second.
    from huggingface_hub import constants, errors, snapshot_download  # noqa: PLC0415
    from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415

    if not sys.stderr.isatty():
        disable_progress_bars()

    def fetch(patterns: tuple[str, ...]) -> Path:
        found: str = snapshot_download(
            repository, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(COPIES)
        )
        return Path(found)

    at = constants.ENDPOINT
    try:
        directory = fetch((*MODEL_FILES, SAFETENSORS) if weights else TOKENIZER_FILES)
        if weights and not any(directory.glob(SAFETENSORS)):
            fetch(OTHER_WEIGHTS)
        absent = _absent(directory, weights=weights) if is_model else ""
        if not (absent and (reason := _unreachable(repository, revision))):
            return directory  # a file that is not on the Hub either is reported by the user of the directory
        problem = f"the cache {constants.HF_HUB_CACHE} has only part of {repository} (no {absent}), and {reason}"
    except errors.GatedRepoError:
        problem = f"access to {at}/{repository} is restricted: accept its terms there, and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        problem = f"{at} has no model {repository}, or it is private: check the name, or set HF_TOKEN"
    except errors.RevisionNotFoundError:
        problem = f"the model {repository} at {at} has no branch, tag or commit {revision}"
    except errors.LocalEntryNotFoundError as error:
        where = f"{repository} is not in the cache {constants.HF_HUB_CACHE}"
        reason = f"{at} cannot be reached ({_first_line(error.__cause__ or error)})"
        problem = f"{where}, and {'HF_HUB_OFFLINE is set' if constants.is_offline_mode() else reason}"
    except (httpx.RequestError, httpx.InvalidURL, ImportError, OSError, ValueError) as error:
        problem = f"cannot download {repository} from {at}: {_first_line(error)}"
    raise ConfigError(f"{missing}, and {problem}")


def _absent(directory: Path, *, weights: bool) -> str:
    """Return the first file of a model that its directory lacks, or `weights`. Empty if the directory is complete."""
    names = list(REQUIRED_FILES)
    if weights:
        present = [pattern for pattern in (SAFETENSORS, *OTHER_WEIGHTS) if any(directory.glob(pattern))]
        if not present:
            return "weights"
        for index in directory.glob(f"{present[0]}.index.json"):
            if not any(fnmatch(index.name, pattern) for pattern in COPIES):
                names += sorted(set(json.loads(index.read_text()).get("weight_map", {}).values()))
    return next((name for name in names if not (directory / name).is_file()), "")


def _unreachable(repository: str, revision: str | None) -> str:
    """Return why the Hub cannot be reached. Empty if it can."""
    from huggingface_hub import HfApi, constants, errors  # noqa: PLC0415 - takes half a second

    try:
        HfApi().model_info(repository, revision=revision or constants.DEFAULT_REVISION)
    except errors.OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except errors.HfHubHTTPError:
        raise
    except (httpx.TransportError, OSError) as error:  # huggingface_hub below 1.0 uses requests, with OSErrors
        return f"{constants.ENDPOINT} cannot be reached ({_first_line(error)})"
    return ""


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
