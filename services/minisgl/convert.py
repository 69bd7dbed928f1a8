"""A GGUF file of the llama architecture, written as a Hugging Face folder.

The weights become plain floating point numbers: float32 by default, because a quantised block
(scale times integer plus offset) is exact only there; bfloat16 halves the size and moves greedy
outputs. Tensors are read, dequantised and written one at a time, so memory holds one of them.
"""

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from minisgl.config import StartError, UsageError

Array = npt.NDArray[Any]

_SAFETENSORS_NAME = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")
_CONTROL, _USER_DEFINED = 3, 4


def convert_gguf(file: Path | str, out_dir: Path | str, *, dtype: str = "float32") -> Path:
    """Write the model in `file` to the new folder `out_dir`, which it returns.

    The folder appears under its name only when it is complete. Raises `UsageError` for a missing
    file, a target in use or another dtype, `StartError` for a file that cannot be converted.
    """
    source, target = Path(file), Path(out_dir)
    if dtype not in _SAFETENSORS_NAME:
        raise UsageError(f"--dtype must be {' or '.join(_SAFETENSORS_NAME)}, not {dtype!r}")
    if not source.is_file():
        raise UsageError(f"GGUF file {str(source)!r} does not exist or is no file")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"target {str(target)!r} exists and is not an empty folder")
    model = _Gguf(source)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise UsageError(f"target {str(target)!r} cannot be made: {error.strerror}") from error
    try:
        model.write(work, dtype)
        work.chmod(0o755)
        work.rename(target)
    except OSError as error:
        raise StartError(f"{str(target)!r} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


class _Gguf:
    """An opened GGUF file, checked to be one that can be converted."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise StartError(
                "reading GGUF files needs the package gguf: pip install 'minisglang[convert]'"
            ) from error
        self.path = path
        self._dequantize: Callable[..., Array] = gguf.dequantize
        with self._readable():
            self._reader = gguf.GGUFReader(path)
            self._tensors = {t.name: t for t in self._reader.tensors}
        architecture = self._meta("general.architecture", "")
        if architecture != "llama":
            self._refuse(f"its architecture is {architecture!r}, and only 'llama' is known")
        if self._meta("split.count", 1) > 1:
            self._refuse("it is one part of several: join them with gguf-split --merge first")
        if "blk.0.ffn_gate_inp.weight" in self._tensors:
            self._refuse("it is a mixture of experts, and only dense llama models are known")
        self.layers = int(self._need("llama.block_count"))
        self.heads = int(self._need("llama.attention.head_count"))
        self.kv_heads = int(self._meta("llama.attention.head_count_kv", self.heads))
        self.hidden = int(self._need("llama.embedding_length"))
        default_dim = self.hidden // self.heads
        self.head_dim = int(self._meta("llama.attention.key_length", default_dim))
        self.names = dict(self._hf_names())
        if missing := sorted(set(self.names) - set(self._tensors)):
            self._refuse(f"tensor {missing[0]!r} is missing ({len(missing)} in all)")
        if unknown := sorted(set(self._tensors) - set(self.names) - {"rope_freqs.weight"}):
            self._refuse(f"tensor {unknown[0]!r} is not known ({len(unknown)} such)")

    def _refuse(self, why: str) -> None:
        raise StartError(f"{self.path} cannot be converted: {why}")

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        # The reader maps the file and meets damage as whatever numpy makes of it.
        try:
            yield
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
            raise StartError(
                f"{self.path} is no whole GGUF file (broken off or damaged): {error}"
            ) from error

    def _meta(self, key: str, default: Any = None) -> Any:
        with self._readable():
            field = self._reader.get_field(key)
            return default if field is None else field.contents()

    def _need(self, key: str) -> Any:
        value = self._meta(key)
        if value is None:
            self._refuse(f"it says nothing of {key}")
        return value

    def _hf_names(self) -> Iterator[tuple[str, str]]:
        for ours, theirs in TOP_TENSORS.items():
            if ours != "output" or "output.weight" in self._tensors:
                yield f"{ours}.weight", f"{theirs}.weight"
        for i in range(self.layers):
            for ours, theirs in LAYER_TENSORS.items():
                yield f"blk.{i}.{ours}.weight", f"model.layers.{i}.{theirs}.weight"

    def write(self, folder: Path, dtype: str) -> None:
        """Everything into `folder`: what can be refused first, the weights last."""
        context = int(self._need("llama.context_length"))
        tokens: list[str] = self._need("tokenizer.ggml.tokens")
        ids = {
            name: int(value)
            for name, key in (
                ("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"),
            )
            if (value := self._meta(f"tokenizer.ggml.{key}_token_id")) is not None
        }  # fmt: skip
        for name, token_id in ids.items():
            if not 0 <= token_id < len(tokens):
                self._refuse(f"its {name} token {token_id} is outside of the vocabulary")
        self._write_tokenizer(folder, tokens, ids, context)
        ends = [ids["eos"]] if "eos" in ids else []
        ends += [i for i in map(_index_of(tokens), _END_OF_TURN) if i is not None]
        ends = list(dict.fromkeys(ends))
        eos: int | list[int] | None = ends[0] if len(ends) == 1 else ends or None
        shared = {"bos_token_id": ids.get("bos"), "eos_token_id": eos}
        if "pad" in ids:
            shared["pad_token_id"] = ids["pad"]
        _write_json(folder / "generation_config.json", shared)
        _write_json(folder / "config.json", self._config(dtype, context) | shared)
        with open(folder / "model.safetensors", "wb") as out:
            self._write_weights(out, dtype)
            os.fsync(out.fileno())

    def _config(self, dtype: str, context: int) -> dict[str, Any]:
        theta = _shortest(self._meta("llama.rope.freq_base", 10000.0))
        scaling = self._meta("llama.rope.scaling.type", "none")
        if scaling not in ("none", "") or (
            self._meta("llama.rope.dimension_count", self.head_dim) != self.head_dim
        ):
            self._refuse(f"its rotary embedding (scaling {scaling!r}) is not known")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": dtype,
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "hidden_size": self.hidden,
            "intermediate_size": int(self._need("llama.feed_forward_length")),
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": context,
            "rms_norm_eps": _shortest(self._need("llama.attention.layer_norm_rms_epsilon")),
            "rope_theta": theta,
            "rope_parameters": self._rope(theta),
            "tie_word_embeddings": "output.weight" not in self._tensors,
        }

    def _rope(self, theta: float) -> dict[str, Any]:
        """Rope parameters. Llama 3.1 stores what its scaling comes to for each frequency."""
        if "rope_freqs.weight" not in self._tensors:
            return {"rope_type": "default", "rope_theta": theta}
        with self._readable():
            stored = np.asarray(self._tensors["rope_freqs.weight"].data, np.float64)
        factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
        turns = original / (2 * math.pi * theta ** (np.arange(0, 1, 2 / self.head_dim)))
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
            self._refuse("its rope_freqs are not those of the Llama 3 scaling")
        return {
            "rope_type": "llama3", "rope_theta": theta, "factor": factor,
            "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }  # fmt: skip

    def _write_tokenizer(
        self, folder: Path, tokens: list[str], ids: dict[str, int], context: int
    ) -> None:
        from tokenizers import AddedToken, Tokenizer, decoders, models, processors

        kind = self._meta("tokenizer.ggml.model")
        if kind != "gpt2":
            self._refuse(f"its tokenizer is of kind {kind!r}, and only 'gpt2' (BPE) is known")
        vocab = {token: i for i, token in enumerate(tokens)}
        if len(vocab) != len(tokens):
            self._refuse("its vocabulary holds a token twice")
        merges = [tuple(m.split(" ", 1)) for m in self._need("tokenizer.ggml.merges")]
        pre = self._meta("tokenizer.ggml.pre", "default")
        llama3 = pre in ("llama-bpe", "llama3", "llama-v3")
        try:
            tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=llama3))
        except Exception as error:  # the library raises a bare Exception
            raise StartError(f"{self.path}: its merges do not fit its tokens: {error}") from error
        tokenizer.pre_tokenizer = self._pre_tokenizer(pre)
        tokenizer.decoder = decoders.ByteLevel()
        types = self._meta("tokenizer.ggml.token_type", [1] * len(tokens))
        for token, kind in zip(tokens, types, strict=False):
            if kind in (_CONTROL, _USER_DEFINED):
                added = AddedToken(token, special=kind == _CONTROL, normalized=False)
                tokenizer.add_tokens([added])
        if self._meta("tokenizer.ggml.add_bos_token", llama3) and "bos" in ids:
            bos = tokens[ids["bos"]]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, ids["bos"])]
            )
        tokenizer.save(str(folder / "tokenizer.json"))
        named = {f"{name}_token": tokens[i] for name, i in ids.items()}
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
        }
        _write_json(folder / "tokenizer_config.json", settings | named)
        if template := self._meta("tokenizer.chat_template"):
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")

    def _pre_tokenizer(self, pre: str) -> Any:
        from tokenizers import Regex, pre_tokenizers

        def split(pattern: str) -> Any:
            pieces = pre_tokenizers.Split(Regex(pattern), "isolated")
            plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            return pre_tokenizers.Sequence([pieces, plain])

        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        known: dict[str, Callable[[], Any]] = {
            "default": lambda: gpt2,
            "gpt-2": lambda: gpt2,
            "smollm": lambda: pre_tokenizers.Sequence([digits, gpt2]),
            "llama-bpe": lambda: split(_LLAMA3_SPLIT),
            "llama3": lambda: split(_LLAMA3_SPLIT),
            "llama-v3": lambda: split(_LLAMA3_SPLIT),
            "qwen2": lambda: split(_QWEN2_SPLIT),
        }
        if pre not in known:
            self._refuse(f"its pre-tokenizer is {pre!r}; known are {', '.join(known)}")
        return known[pre]()

    def _write_weights(self, out: BinaryIO, dtype: str) -> None:
        """The safetensors format: length of the header, the header, the tensors in its order."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for ours, theirs in self.names.items():
            shape = [int(n) for n in reversed(self._tensors[ours].shape)]
            start, end = end, end + math.prod(shape) * _ITEMSIZE[dtype]
            entry = {"dtype": _SAFETENSORS_NAME[dtype], "shape": shape}
            header[theirs] = entry | {"data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        out.write(len(text).to_bytes(8, "little") + text)
        with tqdm(
            total=end, desc="Converting", unit="B", unit_scale=True, disable=None
        ) as progress:
            for ours, theirs in self.names.items():
                data = _cast(self._weight(ours), dtype)
                if list(data.shape) != header[theirs]["shape"]:
                    self._refuse(f"tensor {ours!r} has not the shape that it claims")
                out.write(data.data)
                progress.update(data.nbytes)

    def _weight(self, name: str) -> Array:
        """One tensor as float32, rows of Q and K in Hugging Face's order."""
        tensor = self._tensors[name]
        try:
            with self._readable():
                data = self._dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            self._refuse(f"tensor {name!r} is of the unknown type {tensor.tensor_type.name}")
        if ".attn_q." in name:
            return self._unpermuted(data, self.heads)
        if ".attn_k." in name:
            return self._unpermuted(data, self.kv_heads)
        return data

    def _unpermuted(self, data: Array, heads: int) -> Array:
        # GGUF keeps the two rows that rope turns together side by side; Hugging Face keeps all
        # first ones of a head before all second ones.
        with self._readable():
            rows = data.reshape(heads, data.shape[0] // heads // 2, 2, *data.shape[1:])
            return rows.swapaxes(1, 2).reshape(data.shape)


def _index_of(tokens: list[str]) -> Callable[[str], int | None]:
    places = {token: i for i, token in enumerate(tokens)}
    return places.get


def _shortest(value: float) -> float:
    """The shortest decimal number that is this float32: 1e-05 rather than 9.99999974e-06."""
    return float(str(np.float32(value)))


def _cast(data: Array, dtype: str) -> Array:
    """`data` in rows, as `dtype`; bfloat16 as its 16 bits, rounded to nearest even."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(data, dtype=dtype)
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
