"""Two tiny tokenizers: one token a byte (byte-level), and words with marked spaces and byte fallback (Llama)."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS = 256
WORDS = ("▁Hello", "▁world", "▁the", "▁", "!", ",", "a", "b", "▁a")


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes themselves; 256 is <eos>, 257 <start>."""
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<start>", special=True)])
    return tokenizer


def word_tokenizer() -> Tokenizer:
    """Ids 0 <unk>, 1.. WORDS, then the 256 byte tokens."""
    pieces = ["<unk>", *WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def _alphabet() -> list[str]:
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(stand_ins)) for byte in range(256)]
