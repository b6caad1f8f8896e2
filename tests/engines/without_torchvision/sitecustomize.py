"""Let vLLM serve images of Qwen2-VL without torchvision, in every Python process that has this folder in its path.

torchvision has no build for CPUs on PyPI. transformers has an image processor without it, but vLLM's module of Qwen2-VL
imports the other one, and its processor needs one for videos.
"""

import importlib.util
import sys
import types
from typing import Any

IMAGES = "transformers.models.qwen2_vl.image_processing_{}qwen2_vl"
MODULE = "vllm.model_executor.models.qwen2_vl"


class Images(types.ModuleType):
    """Has the contents of the module without torchvision, which is imported when it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of modules that are being imported
            raise AttributeError(name)
        return getattr(importlib.import_module(IMAGES.format("pil_")), name)


class Finder:
    """Changes vLLM's module when it is imported."""

    def find_spec(self, name: str, *_: object) -> Any:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.Qwen2VLProcessingInfo.get_hf_processor = processor

        spec.loader.exec_module = exec_module
        return spec


def processor(info: Any, **_: object) -> Any:
    from transformers import Qwen2VLProcessor  # noqa: PLC0415

    Qwen2VLProcessor.check_argument_for_proper_class = lambda *_: None
    images = sys.modules[IMAGES.format("")].Qwen2VLImageProcessorPil.from_pretrained(info.ctx.model_config.model)
    return Qwen2VLProcessor(image_processor=images, tokenizer=info.get_tokenizer(), video_processor=images)


if importlib.util.find_spec("torchvision") is None:
    sys.modules[IMAGES.format("")] = Images(IMAGES.format(""), __doc__)
    sys.meta_path.insert(0, Finder())
