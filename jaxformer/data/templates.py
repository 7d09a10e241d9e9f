"""Examples as text: templates such as "premise: {text} hypothesis: {pair}" filled with the fields of an example.

A field of a template is a text of the example, or

    {label}    the word of its class (`task.template.words`, else the name of the class)
    {tags}     the names of its tags, with blanks between
    {answer}   the first of its answers; nothing if it has none
    {score}    its score, a number from 0 to 1, in a form such as {score:.1f}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxformer import registry
from jaxformer.config import TemplateConfig, templates
from jaxformer.data.sources import Dataset, Example, Examples, examples_at
from jaxformer.errors import ConfigError

PATH = "config.task.template"


def rendered(dataset: Dataset, template: TemplateConfig) -> Dataset:
    """`dataset` with the texts of `template` as "source" and "target" of every example, beside its other fields.

    Raises:
      ConfigError: a template names a field that the examples do not have, or a word is of a class that is not theirs.
    """
    classes = dataset.classes or ()
    for name in template.words:
        if name not in classes:
            known, near = ", ".join(classes) or "it has none", registry.nearest(name, classes)
            raise ConfigError(f"{PATH}.words: got a word for {name!a}, expected a class of the data: {known}{near}")
    for examples in dataset.splits.values():
        if len(examples):
            _check_fields(template, examples[0])
    splits = {name: RenderedExamples(examples, template, classes) for name, examples in dataset.splits.items()}
    return dataclasses.replace(dataset, splits=splits)


@dataclass(frozen=True)
class RenderedExamples:
    """Examples with the texts of a template as "source" and "target".

    Attributes:
      examples: the split.
      template: the templates.
      classes: names of the classes of its labels and tags.
    """

    examples: Examples
    template: TemplateConfig
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self._rendered(self.examples[index])

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Example]:
        return [self._rendered(example) for example in examples_at(self.examples, indices)]

    def _rendered(self, example: Example) -> Example:
        values = field_values(example, self.classes, self.template.words)
        source, target = (fill(getattr(self.template, side), values) for side in ("source", "target"))
        return {**example, "source": source, "target": target}


def field_values(example: Example, classes: Sequence[str], words: Mapping[str, str]) -> dict[str, Any]:
    """Values of a template's fields in `example`, by name: texts, and the number `score`."""
    name = lambda index: words.get(classes[index], classes[index]) if classes else str(index)  # noqa: E731
    values = {role: value for role, value in example.items() if isinstance(value, str) or role == "score"}
    if "label" in example:
        values["label"] = name(example["label"])
    if "tags" in example:
        values["tags"] = " ".join(map(name, example["tags"]))
    if "answers" in example:
        values["answer"] = example["answers"][0] if example["answers"] else ""
    return values


def fill(template: str, values: Mapping[str, Any]) -> str:
    """The template with its fields replaced by `values`."""
    return "".join(
        piece.text + ("" if piece.field is None else format(values[piece.field], piece.form))
        for piece in templates.pieces(template)
    )


def references(template: TemplateConfig, example: Example) -> list[str]:
    """The right targets of a rendered example, each once: one for every answer, or its target."""
    if not example.get("answers") or "answer" not in templates.fields(template.target):
        return [example["target"]]
    return list(dict.fromkeys(fill(template.target, {**example, "answer": answer}) for answer in example["answers"]))


def choices(template: TemplateConfig, classes: Sequence[str]) -> list[str]:
    """The targets that a prediction of the kind "rank" chooses from: those of the config, or one for every class.

    Raises:
      ConfigError: there are fewer than two, or the target has other fields than the label.
    """
    if template.choices:
        found = list(template.choices)
    elif templates.fields(template.target) != ("label",):
        expected = "the field {label} alone, so that every class has one target, or template.choices"
        raise ConfigError(f"{PATH}.target: got {template.target!a} with predict=rank, expected {expected}")
    else:
        names = (template.words.get(name, name) for name in classes)
        found = list(dict.fromkeys(fill(template.target, {"label": name}) for name in names))
    if len(found) < 2:
        raise ConfigError(f"{PATH}.choices: got {len(found)} of them, expected at least 2 with predict=rank; list them")
    return found


def _check_fields(template: TemplateConfig, example: Example) -> None:
    known = field_values(example, (), {})
    for side in ("source", "target"):
        for piece in templates.pieces(getattr(template, side)):
            if piece.field is None:
                continue
            if piece.field not in known:
                near = registry.nearest(piece.field, tuple(known))
                got = f"{PATH}.{side}: got the field {{{piece.field}}}"
                raise ConfigError(f"{got}, expected one that the examples have: {', '.join(known)}{near}")
            try:
                format(known[piece.field], piece.form)
            except ValueError as error:
                got = f"{PATH}.{side}: got {{{piece.field}:{piece.form}}} ({error})"
                raise ConfigError(f"{got}, expected a form of this value, as {{score:.1f}} of a score") from None
