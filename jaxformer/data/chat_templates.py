"""Templates of conversations, in Jinja. A module of its own: most commands render none, and start without Jinja."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, sandbox
from jinja2.parser import Parser

from jaxformer.data.chat import BEGIN, END
from jaxformer.errors import ConfigError


class _Generation(ext.Extension):
    """Blocks `{% generation %} reply {% endgeneration %}`, whose text is put between `BEGIN` and `END`."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own name and type)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return BEGIN + caller() + END


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as the Hugging Face library writes it: jinja's own filter would escape what HTML reserves."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


@functools.cache
def _environment() -> sandbox.ImmutableSandboxedEnvironment:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    return environment


@functools.lru_cache(maxsize=8)
def compile_template(template: str) -> jinja2.Template:
    """The compiled template.

    Raises:
      ConfigError: it is no template.
    """
    try:
        return _environment().from_string(template)
    except (jinja2.TemplateError, RecursionError) as error:
        raise _wrong_template(error) from error


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The text that `template` writes, in which `BEGIN` and `END` stand around generation blocks.

    Raises:
      ConfigError: the template is wrong, or raises an error.
    """
    compiled = compile_template(template)
    try:
        return compiled.render(**variables, raise_exception=_raise_exception)
    except Exception as error:  # whatever a template does, from a failed look-up to a division by zero
        raise _wrong_template(error) from error


def _wrong_template(error: BaseException) -> ConfigError:
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return ConfigError(f"chat template: got an error ({reason}), expected a template for these turns; mend either")
