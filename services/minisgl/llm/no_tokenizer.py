"""What stands for the tokenizer of a folder that holds a config.json alone."""

from minisgl.text import Tokenizer


class NoTokenizer(Tokenizer):
    """No text has ids, and no id has text: for dummy weights, whose output means nothing."""

    def __init__(self, vocab_size: int) -> None:
        self.hf = None
        self._fast = None
        self._bytes: dict[int, bytes] = {}
        self._steps = {}
        self.decoder_types = []
        self.vocab_size = vocab_size
        self.special_ids = frozenset()
        self.cleans_up = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise ValueError("the model folder holds no tokenizer: give prompts as lists of token ids")

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return ""

    def decode_raw(self, ids: list[int]) -> str:
        return ""

    def _token(self, token_id: int) -> str | None:
        return None
