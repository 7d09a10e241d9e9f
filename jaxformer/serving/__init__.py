"""Serving: a trained model behind HTTP on this machine, with OpenAI's public schema for text, and routes for lines.

`server.py` is the HTTP side. `requests.py` reads what clients send, `api.py` hands it to the one thread that computes
(`worker.py`), `running.py` collects what comes back, and `answers.py` writes it. The engine that decodes requests
together is `decode/engine.py`.
"""

from jaxformer.serving.limits import Limits
from jaxformer.serving.server import Server

__all__ = ["Limits", "Server"]
