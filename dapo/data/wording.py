"""How a bare question is put to the model: the text around it, and the system message in front."""

from __future__ import annotations

from dataclasses import dataclass

from dapo.errors import ConfigError

QUESTION = "{question}"

# Our own words for what the published recipe asks: its rows come as messages, with the published words in them.
TEMPLATES = {
    "dapo": (
        "Work through this math problem one step at a time. Finish with a last line of the form Answer: $Answer, "
        "where $Answer stands for your result and nothing else is on that line.\n\n"
        "{question}\n\n"
        'Do not forget: your result goes on a line of its own, after "Answer:".'
    )
}


@dataclass(frozen=True, slots=True)
class Wording:
    template: str = QUESTION
    system_prompt: str | None = None

    @classmethod
    def of(cls, template: str | None, system_prompt: str | None) -> Wording:
        """From data.prompt_template and data.system_prompt."""
        if template is None:
            return cls(QUESTION, system_prompt)
        template = TEMPLATES.get(template, template)
        if QUESTION not in template:
            shown = template if len(template) <= 60 else template[:57] + "..."
            raise ConfigError(
                f"data.prompt_template is {shown!r}: expected text that holds {QUESTION}, or the name of a template "
                f"({', '.join(TEMPLATES)})"
            )
        return cls(template, system_prompt)

    def put(self, question: str) -> tuple[dict[str, str], ...]:
        """A bare question as messages. Other braces in the template stay as they are."""
        return self.with_system(({"role": "user", "content": self.template.replace(QUESTION, question)},))

    def with_system(self, messages: tuple[dict[str, str], ...]) -> tuple[dict[str, str], ...]:
        if self.system_prompt is None or messages[0]["role"] == "system":
            return messages
        return ({"role": "system", "content": self.system_prompt}, *messages)
