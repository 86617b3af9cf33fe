"""Small tokenizers of every family that joins its tokens in its own way, made in memory."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = ["a", "b", "lo", "hello", "world", "x", "1", ".", "'s", "do", "n't", "é", "日", "本", "語", "🙂", "한"]


def byte_level_tokenizer() -> Tokenizer:
    """BPE over bytes with merges inside and across characters, so that tokens end in the middle of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["日本語日本 hello world 🙂🙃🙂 한국어 naïve café " * 3], trainer)
    return _with_special_tokens(tokenizer)


def byte_fallback_tokenizer() -> Tokenizer:
    """Makes a tokenizer like Llama 2's: pieces with a visible space, and single bytes for what the vocabulary lacks."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "", "▁", *WORDS, *("▁" + word for word in WORDS)]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_special_tokens(tokenizer)


def unstripped_tokenizer() -> Tokenizer:
    """Makes a tokenizer like Gemma's: as Llama 2's, but a space at the start of a text stays there."""
    tokenizer = byte_fallback_tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Makes a tokenizer like T5's: pieces with a visible space, the first of which is not written."""
    pieces = ["<unk>", "▁", *WORDS, *("▁" + word for word in WORDS)]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, False))
    tokenizer.decoder = decoders.Metaspace()
    return _with_special_tokens(tokenizer)


def word_piece_tokenizer() -> Tokenizer:
    """Makes a tokenizer like BERT's: words are joined by spaces, their continuations begin with ##."""
    pieces = ["[UNK]", *WORDS, *("##" + word for word in WORDS)]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return _with_special_tokens(tokenizer)


def word_end_tokenizer() -> Tokenizer:
    """Makes a tokenizer like that of the first GPT: the end of a word is written."""
    pieces = [*WORDS, *(word + "</w>" for word in WORDS)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.BPEDecoder()
    return _with_special_tokens(tokenizer)


def spaced_tokenizer() -> Tokenizer:
    """Without a decoder: every token is a word."""
    pieces = ["[UNK]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    return _with_special_tokens(tokenizer)


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that is there."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id


def _with_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("日記 é", special=False)])
    return tokenizer
