"""A vocabulary from a Hugging Face directory: tokenizer.json and the files around it.

The encoder is the file's own, told to read special tokens as text (`encode_special_tokens` is state
of the whole tokenizer). What a tokenizer.json may decode with is a short list; others are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.errors import BadFile, UnsupportedModel
from octavo.models.vocab import END_TEXTS, SPACE, Control, Vocab, byte_token, spelled_bytes


@dataclass(frozen=True, slots=True)
class _Decoding:
    """How tokens spell text: bytes in GPT-2's alphabet, or spaces as SPACE and perhaps <0xAB>."""

    byte_level: bool
    byte_tokens: bool = False
    leading_space: bool = False


def _json(directory: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no such file."""
    path = directory / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise BadFile(f"{path}: not a JSON object")
    return value


def _steps(part: Any, children: str) -> list[dict[str, Any]]:
    """The steps of a tokenizer.json component, sequences unfolded."""
    if not isinstance(part, dict):
        return []
    if part.get("type") == "Sequence":
        return [step for child in part.get(children, []) for step in _steps(child, children)]
    return [part]


def _decoding(part: Any) -> _Decoding:
    steps = {step.get("type"): step for step in _steps(part, "decoders")}
    if "ByteLevel" in steps:
        return _Decoding(byte_level=True)
    byte_tokens, strip = "ByteFallback" in steps, steps.get("Strip", {})
    if "Metaspace" in steps:
        scheme = steps["Metaspace"].get("prepend_scheme", "always")
        return _Decoding(False, byte_tokens, leading_space=scheme != "never")
    if steps.get("Replace", {}).get("pattern") == {"String": SPACE}:
        leading = strip.get("content") == " " and strip.get("start") == 1
        return _Decoding(False, byte_tokens, leading_space=leading)
    raise UnsupportedModel(f"tokenizer.json: decoder {sorted(map(str, steps))} is not known")


def _hf_piece(
    encoder: tokenizers.Tokenizer, decoding: _Decoding, added: Mapping[int, str], id: int
) -> bytes:
    if id in added:
        text = added[id]
        return (text if decoding.byte_level else text.replace(SPACE, " ")).encode()
    token = encoder.id_to_token(id)
    if token is None:
        return b""
    if decoding.byte_level:
        return spelled_bytes(token)
    byte = byte_token(token) if decoding.byte_tokens else None
    return token.replace(SPACE, " ").encode() if byte is None else bytes((byte,))


def _strips(added: Mapping[int, Any]) -> bool:
    """Whether any added token swallows the whitespace around it."""
    return any(token.lstrip or token.rstrip for token in added.values())


def _content(token: Any) -> str | None:
    """A token in tokenizer_config.json: its text, or an object with it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _load_encoder(path: Path, data: dict[str, Any]) -> tokenizers.Tokenizer:
    try:
        encoder = tokenizers.Tokenizer.from_str(json.dumps(data))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # tokenizers raises nothing narrower, and its panics are wider
        raise BadFile(f"{path}: {error}") from error
    encoder.no_truncation()  # some files carry their author's training settings
    encoder.no_padding()
    return encoder


def _add_from_config(encoder: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """tokenizer_config.json's added_tokens_decoder completes and overrides tokenizer.json."""
    flags = ("special", "lstrip", "rstrip", "normalized", "single_word")
    listed = config.get("added_tokens_decoder")
    for id, spec in sorted(listed.items(), key=_by_id) if isinstance(listed, dict) else ():
        text = _content(spec)
        if not text:
            raise BadFile(f"tokenizer_config.json: added token {id} has no content")
        options = {flag: bool(spec[flag]) for flag in flags if flag in spec}
        encoder.add_tokens([AddedToken(text, **options)])
        if encoder.token_to_id(text) != int(id):
            raise BadFile(f"tokenizer_config.json: added token {text!r} cannot have id {id}")


def _add_named(encoder: tokenizers.Tokenizer, named: Mapping[str, str]) -> None:
    """A token with a role is a special token, even if tokenizer.json does not list it."""
    listed = {token.content for token in encoder.get_added_tokens_decoder().values()}
    for text in set(named.values()) - listed:
        if encoder.token_to_id(text) is not None:
            encoder.add_special_tokens([AddedToken(text, normalized=False)])


def _by_id(item: tuple[str, Any]) -> int:
    if not item[0].isdecimal():
        raise BadFile(f"tokenizer_config.json: added token id {item[0]!r} is not a number")
    return int(item[0])


def _hf_named(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token ...: by tokenizer_config.json, else by special_tokens_map.json."""
    named = {}
    for source in (_json(directory, "special_tokens_map.json"), config):
        for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
            text = _content(source.get(f"{role}_token"))
            if text is not None:
                named[f"{role}_token"] = text
    return named


def _role_ids(
    encoder: tokenizers.Tokenizer, directory: Path, named: Mapping[str, str], role: str
) -> list[int]:
    """Ids for "bos" or "eos": the named token, then those of generation_config.json and config.json
    (one or a list in each)."""
    found = [encoder.token_to_id(named.get(f"{role}_token", ""))]
    for name in ("generation_config.json", "config.json"):
        value = _json(directory, name).get(f"{role}_token_id")
        found += value if isinstance(value, list) else [value]
    return [id for id in found if isinstance(id, int) and not isinstance(id, bool) and id >= 0]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: {error}") from error


def _hf_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name; files win over tokenizer_config.json, as in transformers."""
    found: dict[str, str] = {}
    for listed in (config.get("chat_template"), _json(directory, "chat_template.json")):
        value = listed.get("chat_template") if isinstance(listed, dict) else listed
        for entry in value if isinstance(value, list) else [{"name": "default", "template": value}]:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                found[str(entry.get("name"))] = entry["template"]
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _read_text(path)
    if (directory / "chat_template.jinja").is_file():
        found["default"] = _read_text(directory / "chat_template.jinja")
    return found


def _inner(path: Path, data: dict[str, Any], prepare: Callable[[Any], None]) -> Any:
    """An encoder for text that does not begin the input, where that makes a difference."""
    first = [
        step
        for step in _steps(data.get("pre_tokenizer"), "pretokenizers")
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first"
    ]
    if not first:
        return None
    for step in first:
        step["prepend_scheme"] = "never"
    inner = _load_encoder(path, data)
    prepare(inner)
    return inner


def from_hf(directory: Path) -> Vocab:
    """The vocabulary in a Hugging Face directory. Raises BadFile, UnsupportedModel.

    Read: tokenizer.json, tokenizer_config.json, special_tokens_map.json, generation_config.json,
    config.json, chat_template.jinja (or .json), additional_chat_templates.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModel(f"{directory}: no tokenizer.json (other formats are not read)")
    data, config = _json(directory, path.name), _json(directory, "tokenizer_config.json")
    decoding = _decoding(data.get("decoder"))
    named = _hf_named(directory, config)

    def prepare(encoder: tokenizers.Tokenizer) -> None:
        _add_from_config(encoder, config)
        _add_named(encoder, named)
        encoder.encode_special_tokens = True

    encoder = _load_encoder(path, data)
    prepare(encoder)
    begins = encoder.encode("", add_special_tokens=True).ids
    added = encoder.get_added_tokens_decoder()
    controls = {
        token.content: Control(id, token.lstrip, token.rstrip)
        for id, token in added.items()
        if token.special or token.content in named.values()
    }
    begin_ids = _role_ids(encoder, directory, named, "bos")
    bos = begin_ids[0] if begin_ids else None
    ends = _role_ids(encoder, directory, named, "eos")
    ends += [controls[text].id for text in END_TEXTS & controls.keys()]
    add_bos = config.get("add_bos_token")
    if not isinstance(add_bos, bool):
        add_bos = bos in begins[:1]
    return Vocab(
        encoder=encoder,
        inner=_inner(path, data, prepare) or encoder,
        size=max(encoder.get_vocab_size(), *(id + 1 for id in added), 0),
        piece=partial(_hf_piece, encoder, decoding, {id: t.content for id, t in added.items()}),
        controls=controls,
        special_ids=frozenset(control.id for control in controls.values()),
        bos_id=bos,
        eos_ids=frozenset(ends),
        add_bos=add_bos and bos is not None,
        leading_space=decoding.leading_space,
        named=named,
        templates=_hf_templates(directory, config),
        lossless=not data.get("normalizer") and decoding.byte_level and not _strips(added),
    )
