"""Token ids equal transformers', with one BOS, and without torch in the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from core.models.source import ModelSource
from core.models.tokenizer import load_tokenizer, tokenizer_vocab
from core.types import InvalidRequest, PartwiseError
from tests.models.real import source

TEXTS = [
    "Hello world",
    " leading",
    "trailing ",
    "a\n\n\nb\t\tc   d",
    "😀🏳️‍🌈👩‍👩‍👧‍👦 ďж客 中文字符 日本語 العربية",
    "1234 56.78 ½ ²³ ١٢٣",
    "<|im_start|>user\nhi<|im_end|>",
    "<s>hi</s>",
    "",
    "\x00\ufeff\u200b\ufffd",
    "don't I'll we've",
    "e\u0301 é",
    "a" * 300,
    "   ",
    "\r\n\r\n x",
    "def f(x):\n    return x**2\n",
    "▁ ▁▁",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [{"role": "user", "content": "Hi there"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level tokenizer that puts a BOS before texts, whose template writes one too."""
    path = tmp_path_factory.mktemp("tokenizer")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(4)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    wrapped.save_pretrained(path)
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def own(folder):
    return load_tokenizer(ModelSource("tiny", folder=folder))


def test_folder_equals_transformers(folder, own):
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.backend_tokenizer.no_truncation()
    for text in TEXTS[:7] + TEXTS[8:]:
        assert own.encode(text) == theirs.backend_tokenizer.encode(text).ids
        assert own.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert own.decode(own.encode(text)) == theirs.decode(own.encode(text), skip_special_tokens=True)


def test_one_bos_on_every_path(folder, own):
    theirs = AutoTokenizer.from_pretrained(folder)
    chat = own.encode_chat(CHAT)
    assert chat == theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    text = own.render_chat(CHAT)
    assert text == "<s><user>Hi there</s><assistant>"
    assert own.encode(text) == chat
    for ids in (chat, own.encode("Hi"), own.encode("<s>Hi"), own.encode("<s>")):
        assert ids.count(0) == 1 and ids[0] == 0
    assert own.encode("Hi", add_special_tokens=False).count(0) == 0


def test_a_second_bos_that_was_asked_for_stays(own):
    assert own.encode("<s><s>Hi").count(0) == 2


def test_nothing_is_cut_off(own):
    assert len(own.encode("word " * 100)) > 100


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_texts_come_back(own, text):
    ids = own.encode(text, add_special_tokens=False)
    assert own.decode(ids, skip_special_tokens=False) == text


def test_what_a_tokenizer_tells(folder, own):
    assert own.has_chat_template and own.bos_token_id == 0 and own.eos_token_ids == (1,)
    assert own.vocab_size == own.backend.get_vocab_size() == tokenizer_vocab(ModelSource("tiny", folder=folder))
    stream = decoders.DecodeStream(skip_special_tokens=True)
    ids = own.encode("🌶 客", add_special_tokens=False)
    assert "".join(stream.step(own.backend, token) or "" for token in ids) == "🌶 客"


def test_lone_surrogates(own):
    with pytest.raises(InvalidRequest, match="Unicode"):
        own.encode("emoji \ud83d")
    with pytest.raises(InvalidRequest, match="Unicode"):
        own.encode_chat([{"role": "user", "content": "\udcf0"}])


def test_messages_that_the_template_refuses(own):
    with pytest.raises(InvalidRequest, match="no role wizard") as caught:
        own.encode_chat([{"role": "wizard", "content": "x"}])
    assert caught.value.param == "messages"


def test_templates_are_sandboxed(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(InvalidRequest, match="refuses"):
        load_tokenizer(ModelSource("evil", folder=tmp_path)).encode_chat(CHAT)


def test_a_base_model_has_no_template(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").unlink()
    base = load_tokenizer(ModelSource("base", folder=tmp_path))
    assert not base.has_chat_template
    with pytest.raises(InvalidRequest, match="base has no chat template"):
        base.encode_chat(CHAT)


def test_a_folder_without_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PartwiseError, match="tokenizer cannot be read"):
        load_tokenizer(ModelSource("none", folder=tmp_path))
    assert tokenizer_vocab(ModelSource("none", folder=tmp_path)) is None


# --- out of a GGUF file -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smol():
    return load_tokenizer(source("smollm2_135m"))


@pytest.fixture(scope="module")
def smol_reference():
    file = source("smollm2_135m").gguf
    return PreTrainedTokenizerFast(name_or_path=str(file.parent), gguf_file=file.name)


@pytest.mark.model
def test_smollm2_equals_transformers(smol, smol_reference):
    for text in TEXTS:
        for special in (True, False):
            assert smol.encode(text, special) == smol_reference.encode(text, add_special_tokens=special)
        ids = smol.encode(text)
        assert smol.decode(ids) == smol_reference.decode(ids, skip_special_tokens=True)
    conversation = [*CHAT, {"role": "assistant", "content": "Hello 😀"}, {"role": "user", "content": " again"}]
    for messages in (CHAT, conversation, [{"role": "system", "content": "Be brief."}, *CHAT]):
        expected = smol_reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert smol.encode_chat(messages) == expected
    assert smol.eos_token_ids == (2,) and smol.vocab_size == 49152


@pytest.mark.model
def test_loading_imports_no_torch_and_leaves_no_file(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from core.models.source import ModelSpec, resolve\n"
        "from core.models.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer(resolve(ModelSpec(path={str(source('smollm2_135m').gguf)!r})))\n"
        "print(tokenizer.encode_chat([{'role': 'user', 'content': 'hi'}]))\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "assert not list(Path.cwd().iterdir())\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.model
def test_conversion_is_kept_and_two_may_run_at_once(tmp_path, smol):
    file = str(source("smollm2_135m").gguf)
    code = (
        "from core.models.source import ModelSource\nfrom core.models.tokenizer import load_tokenizer\n"
        f"from pathlib import Path\nprint(load_tokenizer(ModelSource('m', gguf=Path({file!r}))).encode('Hello 客'))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PARTWISE_CACHE": str(tmp_path)}
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) for _ in range(2)
    ]
    out = [run.communicate(timeout=240)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert out[0] == out[1] == f"{smol.encode('Hello 客')}\n"
    kept = list((tmp_path / "tokenizers").iterdir())
    assert len(kept) == 1 and (kept[0] / "tokenizer.json").is_file()


@pytest.mark.slow
def test_gemma3_equals_transformers():
    found = source("gemma3_270m")
    own = load_tokenizer(found)
    theirs = AutoTokenizer.from_pretrained(found.gguf.parent, gguf_file=found.gguf.name)
    for text in [*TEXTS, "x<eos> <start_of_turn>", "<unk><pad>[multimodal]<unused5>"]:
        for special in (True, False):
            assert own.encode(text, special) == theirs.encode(text, add_special_tokens=special)
    assert own.encode("<bos>hi").count(2) == 1
    assert not own.has_chat_template
