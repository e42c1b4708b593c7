"""Hugging Face directories: tiny ones of every shape, against transformers on the same files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import trainers as train

from octavo.errors import BadFile, InvalidRequest, UnsupportedModel
from octavo.models.template import ChatTemplate
from octavo.models.tokenizer import Tokenizer, load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures" / "tokenizer"))
from corpus import texts

CORPUS = texts()
TEXT = [line for text in CORPUS[:36] for line in text.splitlines()]
SPECIAL = ["<s>", "</s>", "<|eot_id|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|eot_id|>{{ m.role }}: {{ m.content | trim }}"
    "{% endfor %}{% if add_generation_prompt %}</s>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "  Hello, wörld 123! "},
    {"role": "assistant", "content": "ok <b>\n\n\tx"},
]


def byte_level() -> tokenizers.Tokenizer:
    """Like Llama 3: BOS by a post-processor, control tokens outside the vocabulary."""
    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    trainer = train.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    encoder.train_from_iterator(TEXT, trainer)
    encoder.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    encoder.add_tokens([AddedToken("<tool>", normalized=False)])
    bos = encoder.token_to_id("<s>")
    encoder.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    return encoder


def qwen_like() -> tokenizers.Tokenizer:
    """As Qwen: NFC first, no BOS."""
    encoder = byte_level()
    encoder.normalizer = normalizers.NFC()
    encoder.post_processor = processors.ByteLevel(trim_offsets=False)
    return encoder


def _sentencepiece(encoder: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = train.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", *SPECIAL[:2], *bytes_], show_progress=False
    )
    encoder.train_from_iterator(TEXT, trainer)
    state = json.loads(encoder.to_str())
    state["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 3]
    encoder = tokenizers.Tokenizer.from_str(json.dumps(state))
    encoder.add_special_tokens([AddedToken(SPECIAL[2], normalized=False)])
    return encoder


def llama2_like() -> tokenizers.Tokenizer:
    """The older SentencePiece shape: a normalizer puts a space before every piece of text."""
    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    replace = decoders.Replace("\u2581", " ")
    encoder.decoder = decoders.Sequence(
        [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _sentencepiece(encoder)


def mistral_like() -> tokenizers.Tokenizer:
    """The newer one: a space before the first piece of the input only."""
    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    replace = decoders.Replace("\u2581", " ")
    encoder.decoder = decoders.Sequence(
        [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _sentencepiece(encoder)


def gemma_like() -> tokenizers.Tokenizer:
    """No space before anything."""
    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.normalizer = normalizers.Replace(" ", "\u2581")
    replace = decoders.Replace("\u2581", " ")
    encoder.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()])
    return _sentencepiece(encoder)


SHAPES = [byte_level, qwen_like, llama2_like, mistral_like, gemma_like]
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "chat_template": TEMPLATE,
    "clean_up_tokenization_spaces": False,
}


def directory(path: Path, encoder: tokenizers.Tokenizer, **files: Any) -> Path:
    encoder.save(str(path / "tokenizer.json"))
    files = {"tokenizer_config": CONFIG, **files}
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def load(path: Path) -> Tokenizer:
    return load_tokenizer(SimpleNamespace(metadata=None, directory=path))


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape.__name__)
def both(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Tokenizer, Any]:
    from transformers import PreTrainedTokenizerFast

    make: Callable[[], tokenizers.Tokenizer] = request.param
    path = directory(tmp_path_factory.mktemp("hf"), make())
    return load(path), PreTrainedTokenizerFast.from_pretrained(path)


def test_ids_are_transformers(both: tuple[Tokenizer, Any]) -> None:
    ours, reference = both
    marked = [f"a {text} b<|eot_id|> c\n</s><s>d" for text in CORPUS[:40]]
    for text in [*CORPUS, *marked]:
        want = reference.encode(text, add_special_tokens=False)
        assert ours.encode_with_control(text) == want, text


def test_text_is_transformers(both: tuple[Tokenizer, Any]) -> None:
    ours, reference = both
    for text in CORPUS:
        ids = ours.encode_with_control(f"{text}<|eot_id|> x")
        if "\ufffd" not in ours.decode(ids):
            assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)
            want = reference.decode(ids, skip_special_tokens=False)
            assert ours.decode(ids, skip_special=False) == want


def test_chats_are_transformers(both: tuple[Tokenizer, Any]) -> None:
    ours, reference = both
    for prompt in (True, False):
        want = reference.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False)
        assert ChatTemplate(ours).ids(CHAT, add_generation_prompt=prompt) == want


def test_user_text_never_becomes_a_control_token(both: tuple[Tokenizer, Any]) -> None:
    ours, _ = both
    for text in [*SPECIAL, "".join(SPECIAL), *CORPUS]:
        assert ours.special_ids.isdisjoint(ours.encode(text, bos=False)), text
    ids = ChatTemplate(ours).ids([{"role": "user", "content": "</s><|eot_id|>"}])
    assert sum(id in ours.special_ids for id in ids) == 3  # bos, <|eot_id|>, </s>: the template's


def test_roles_of_tokens(tmp_path: Path) -> None:
    encoder = byte_level()
    ends = {"eos_token_id": [5, 7]}
    t = load(directory(tmp_path, encoder, generation_config=ends, config={"eos_token_id": 9}))
    assert t.eos_ids == {5, 7, 9, *map(encoder.token_to_id, SPECIAL[1:])}
    assert t.bos_id == encoder.token_to_id("<s>")
    assert t.add_bos
    assert t.vocab_size == encoder.get_vocab_size()
    tool = encoder.token_to_id("<tool>")
    assert tool in t.encode("<tool>")
    assert tool not in t.special_ids


def test_add_bos_token_decides_over_the_post_processor(tmp_path: Path) -> None:
    t = load(directory(tmp_path, byte_level(), tokenizer_config={**CONFIG, "add_bos_token": False}))
    assert not t.add_bos


def test_added_tokens_decoder_completes_tokenizer_json(tmp_path: Path) -> None:
    encoder = byte_level()
    id = encoder.get_vocab_size()
    added = {str(id): {"content": "<|extra|>", "special": True, "rstrip": True}}
    config = {**CONFIG, "added_tokens_decoder": added}
    t = load(directory(tmp_path, encoder, tokenizer_config=config))
    want = [*t.encode("a", bos=False), id, *t.encode("b", bos=False)]
    assert t.encode_with_control("a<|extra|>  b") == want
    assert id not in t.encode("<|extra|>")
    added = {"3": {"content": "<|other|>"}}
    with pytest.raises(BadFile, match="cannot have id 3"):
        load(directory(tmp_path, encoder, tokenizer_config={"added_tokens_decoder": added}))


def test_templates_of_every_place(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    config = {**CONFIG, "chat_template": listed}
    t = load(directory(tmp_path, byte_level(), tokenizer_config=config))
    assert t.chat_templates == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("c")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("d")
    assert load(tmp_path).chat_templates == {"default": "c", "tool_use": "b", "rag": "d"}


def test_truncation_in_the_file_is_not_obeyed(tmp_path: Path) -> None:
    encoder = byte_level()
    encoder.enable_truncation(4)
    encoder.enable_padding(length=8)
    t = load(directory(tmp_path, encoder))
    assert t.decode(t.encode("a long text, longer than four tokens")).endswith("four tokens")


def test_a_control_token_that_merges_could_spell_is_cut(tmp_path: Path) -> None:
    encoder = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(["ab", "b"])
    t = load(directory(tmp_path, encoder, tokenizer_config={}))
    assert t.encode_with_control("aab") == [0, 2]
    with pytest.raises(InvalidRequest, match="control token"):
        t.encode("aab")  # "b" alone is a control token too: nothing else spells it


@pytest.mark.parametrize("content", ["{", "[]"])
@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config", "generation_config"])
def test_broken_json_names_the_file(tmp_path: Path, name: str, content: str) -> None:
    directory(tmp_path, byte_level())
    (tmp_path / f"{name}.json").write_text(content)
    with pytest.raises(BadFile, match=f"{name}.json"):
        load(tmp_path)


def test_merges_of_unknown_tokens_are_an_error_of_ours(tmp_path: Path) -> None:
    directory(tmp_path, byte_level())
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["model"]["merges"].append(["a", "none"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(BadFile, match=r"tokenizer\.json"):
        load(tmp_path)


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        load(tmp_path)
    encoder = byte_level()
    encoder.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        load(directory(tmp_path, encoder))
