"""A conversation with a model: it keeps the history and streams the replies."""

from __future__ import annotations

from collections.abc import Iterator

from jaxformer.config import DecodeConfig
from jaxformer.data import chat
from jaxformer.decode.streaming import check_streamable
from jaxformer.model import Model
from jaxformer.tasks import dialogue


class Conversation:
    """The turns so far, and the model that replies to them.

    Attributes:
      messages: the turns, the system's first if there is one. Those that a prompt had no room for are left out.
    """

    def __init__(self, model: Model, system: str = "", decode: DecodeConfig | None = None) -> None:
        """Begins with a turn of the system, if its text is not empty.

        Raises:
          ConfigError: the model has no chat template, or the options choose a beam search.
        """
        self.model, self.system, self.decode = model, system, decode or model.config.decode
        check_streamable(self.decode)
        dialogue.template_of(model.predictor.framing.tokenizers)
        self.reset()

    def reset(self) -> None:
        """Forgets all turns but the system's."""
        self.messages: list[dict[str, str]] = [{"role": "system", "content": self.system}] if self.system else []

    def reply(self, text: str) -> Iterator[str]:
        """The reply to a turn of the user, in pieces. Both become turns of the history.

        If the iterator is closed before its end, the reply is what has been read of it. A turn that is refused, or
        whose reply has not begun, leaves the history as it was.

        Raises:
          ConfigError: the text holds the name of a special token, or the template rejects it.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        predictor = self.model.predictor
        prompt = dialogue.history_prompt(predictor, messages, self.decode)
        kept = chat.without_oldest(messages, prompt.dropped // 2)
        return self._record([dict(message) for message in kept], dialogue.stream_prompt(predictor, prompt, self.decode))

    def _record(self, messages: list[dict[str, str]], pieces: Iterator[str]) -> Iterator[str]:
        given = None
        try:
            for piece in pieces:
                given = (given or "") + piece
                yield piece
            given = given or ""
        finally:
            if given is not None:
                self.messages = [*messages, {"role": "assistant", "content": given}]
