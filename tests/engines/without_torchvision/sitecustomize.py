"""Let vLLM serve images and videos of Qwen-VL without torchvision, in every process that has this folder in its path.

torchvision has no build for CPUs on PyPI. transformers has an image processor without it, but vLLM's module of Qwen2-VL
imports the other one. The video processor needs torchvision only to resize and normalize frames.
"""

import importlib.util
import sys
import types
from typing import Any

IMAGES = "transformers.models.qwen2_vl.image_processing_{}qwen2_vl"
MODULES = {"vllm.model_executor.models.qwen2_vl": "Qwen2VL", "vllm.model_executor.models.qwen2_5_vl": "Qwen2_5_VL"}


class Images(types.ModuleType):
    """Has the contents of the module without torchvision, which is imported when it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of modules that are being imported
            raise AttributeError(name)
        return getattr(importlib.import_module(IMAGES.format("pil_")), name)


class Finder:
    """Changes vLLM's modules when they are imported."""

    def find_spec(self, name: str, *_: object) -> Any:
        if name not in MODULES:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            family = MODULES[name]
            info = getattr(module, f"{family}ProcessingInfo")
            info.get_hf_processor = lambda info, **_: processor(info, f"{family}Processor")

        spec.loader.exec_module = exec_module
        return spec


def processor(info: Any, name: str) -> Any:
    import transformers  # noqa: PLC0415

    made = getattr(transformers, name)
    made.check_argument_for_proper_class = lambda *_: None
    model = info.ctx.model_config.model
    images = sys.modules[IMAGES.format("")].Qwen2VLImageProcessorPil.from_pretrained(model)
    videos = video_processor().from_pretrained(model, do_convert_rgb=False)
    return made(image_processor=images, tokenizer=info.get_tokenizer(), video_processor=videos)


def video_processor() -> Any:
    """Return the class of transformers, with replacements for the functions of torchvision."""
    from torch.nn.functional import interpolate  # noqa: PLC0415
    from transformers.image_processing_backends import TorchvisionBackend  # noqa: PLC0415

    def resize(_: Any, image: Any, size: Any, **__: Any) -> Any:
        shape = (*image.shape[:-2], size.height, size.width)
        return interpolate(image.flatten(0, -4).float(), shape[-2:], mode="bicubic").reshape(shape)

    def normalize(_: Any, image: Any, mean: Any, std: Any, **__: Any) -> Any:
        return (image - mean[:, None, None]) / std[:, None, None]

    missing = [f"torchvision{end}" for end in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")]
    sys.modules.update({name: types.ModuleType(name) for name in missing})
    try:
        module: Any = importlib.import_module("transformers.models.qwen2_vl.video_processing_qwen2_vl")
    finally:
        for name in missing:
            del sys.modules[name]
    TorchvisionBackend.resize, TorchvisionBackend.normalize = resize, normalize
    return module.Qwen2VLVideoProcessor


if importlib.util.find_spec("torchvision") is None:
    sys.modules[IMAGES.format("")] = Images(IMAGES.format(""), __doc__)
    sys.meta_path.insert(0, Finder())
