"""What each token of a vocabulary stands for, by the library's own word."""

from tokenizers import AddedToken, Tokenizer, decoders, models

from serve.httpserver.token_bytes import byte_characters, token_bytes_table


def test_byte_characters_are_256_different_printable_ones():
    characters = byte_characters()
    assert len(set(characters)) == 256
    assert all(character.isprintable() for character in characters)
    assert (characters[ord("A")], characters[ord(" ")], characters[ord("\n")]) == ("A", "Ġ", "Ċ")


def byte_level(pieces: list[str], special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer


def test_pieces_of_byte_level_vocabularies_are_bytes_and_added_tokens_text():
    characters = byte_characters()
    pieces = ["A", "".join(characters[byte] for byte in " é".encode()), characters[0xC3]]
    table, special = token_bytes_table(byte_level(pieces, ["<|é|>"]))
    assert table == [b"A", " é".encode(), b"\xc3", "<|é|>".encode()]
    assert special == {3}


def test_the_table_has_a_place_for_every_id_up_to_the_largest():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "z": 4}, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    table, _ = token_bytes_table(tokenizer)
    assert table == [b"a", b"", b"", b"", b"z"]


def test_sentencepiece_marks_are_spaces_and_byte_pieces_bytes():
    vocabulary = {"<unk>": 0, "<0xE2>": 1, "▁the": 2, "re": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    table, special = token_bytes_table(tokenizer)
    assert table == [b"<unk>", b"\xe2", b" the", b"re"]
    assert special == frozenset()
    tokenizer.decoder = decoders.Metaspace(replacement="▁")
    assert token_bytes_table(tokenizer)[0][1:] == [b"<0xE2>", b" the", b"re"]  # no byte fallback here


def test_other_decoders_are_asked_token_by_token():
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    table, _ = token_bytes_table(tokenizer)
    assert table[1:] == [tokenizer.decode([token]).encode() for token in (1, 2)]
