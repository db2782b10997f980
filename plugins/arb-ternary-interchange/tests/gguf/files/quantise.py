"""Make the files of this folder: models that llama.cpp itself has quantised.

``llama-quantize`` calls the function ``llama_model_quantize`` of the library libllama. The files
here were made by that of the package ``@node-llama-cpp/linux-x64`` 3.22.1 of npm, which is a build
of llama.cpp::

    npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xzf node-llama-cpp-linux-x64-3.22.1.tgz
    LD_LIBRARY_PATH=package/bins/linux-x64 python quantise.py package/bins/linux-x64
"""

from __future__ import annotations

import ctypes
import lzma
import sys
import tempfile
from pathlib import Path

import torch

from arb_ternary_interchange.gguf.exporter import GgufExporter
from arb_ternary_interchange.options import GgufConfig
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder

#: Numbers of file types, and whether the model has a head of its own.
FILES = {"tq1_0": (36, True), "tq2_0": (37, False)}
#: Rows of the weights that differ; the rest repeat them, so that the files can be compressed.
ROWS = 16


class Parameters(ctypes.Structure):
    """``llama_model_quantize_params`` of llama.h."""

    _fields_ = (
        ("threads", ctypes.c_int32),
        ("file_type", ctypes.c_int),
        ("output_tensor_type", ctypes.c_int),
        ("token_embedding_type", ctypes.c_int),
        ("flags", ctypes.c_bool * 6),
        ("pointers", ctypes.c_void_p * 4),
        ("buffer_size", ctypes.c_size_t),
    )


def make_model(tied: bool) -> Decoder:
    """Return a small decoder with float embedding and ternary linears."""
    torch.manual_seed(0)
    config = DecoderConfig(
        architecture="llama",
        width=256,
        layers=1,
        heads=4,
        kv_heads=2,
        feed_forward=256,
        max_length=64,
        group_size="row",
        tie_embeddings=tied,
        float_parts=("embedding", "head", "norms"),
    )
    model = Decoder(config, 256).eval()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "set_trits"):
            trits = module.trits()
            module.set_trits(trits[:ROWS].repeat(len(trits) // ROWS, 1))
        elif weight is not None and weight.dim() == 2:
            weight.data = weight.data[:ROWS].repeat(len(weight) // ROWS, 1)
    return model


def main() -> None:
    libraries = Path(sys.argv[1])
    (path,) = libraries.glob("libggml.*so")
    backends = ctypes.CDLL(str(path))
    backends.ggml_backend_load(str(libraries / "libggml-cpu-x64.so").encode())
    (path,) = libraries.glob("libllama.*so")
    llama = ctypes.CDLL(str(path))
    llama.llama_model_quantize_default_params.restype = Parameters
    for name, (file_type, has_head) in FILES.items():
        parameters = llama.llama_model_quantize_default_params()
        parameters.threads = 1
        parameters.file_type = file_type
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "float.gguf"
            made = Path(folder) / "quantised.gguf"
            metadata = {"name": name, "step": 1, "tokenizer": {"kind": "bytes"}}
            GgufExporter(GgufConfig(type="f32")).export(make_model(not has_head), source, metadata)
            result = llama.llama_model_quantize(
                str(source).encode(), str(made).encode(), ctypes.byref(parameters)
            )
            if result:
                raise SystemExit(f"llama_model_quantize returned {result}")
            content = lzma.compress(made.read_bytes(), preset=9)
        Path(__file__).with_name(f"{name}.gguf.xz").write_bytes(content)
        print(name, len(content))


if __name__ == "__main__":
    main()
