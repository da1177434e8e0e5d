"""A tiny random Llama with a tokenizer of bytes and a chat template, as a folder like any other model."""

from __future__ import annotations

from pathlib import Path

TEMPLATE = (
    "{% for message in messages %}{% if message['content'] == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
    "<start>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant: {% endif %}"
)


def save_tiny_model(folder: Path) -> Path:
    """Head rows 258 to 271 stand for no token, as in models with padded vocabularies."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from tests.serve.tiny_tokenizers import EOS, byte_tokenizer

    config = LlamaConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=257,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.4)
        model.model.embed_tokens.weight.normal_(0, 0.4)
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), eos_token="<eos>", bos_token="<start>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    return folder
