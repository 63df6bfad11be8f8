"""The prompt template and the system prompt that are put around a question."""

from __future__ import annotations

from dataclasses import dataclass

from dapo.errors import ConfigError

QUESTION = "{question}"

# In our own words: the rows of the published dataset are messages that already contain the published instructions.
TEMPLATES = {
    "dapo": (
        "Work through this math problem one step at a time. Finish with a last line of the form Answer: $Answer, "
        "where $Answer stands for your result and nothing else is on that line.\n\n"
        "{question}\n\n"
        'Do not forget: your result goes on a line of its own, after "Answer:".'
    )
}


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """A prompt template and an optional system prompt."""

    template: str = QUESTION
    system_prompt: str | None = None

    @classmethod
    def of(cls, template: str | None, system_prompt: str | None) -> PromptFormat:
        """Build it from data.prompt_template and data.system_prompt; the template may be a name in TEMPLATES."""
        if template is None:
            return cls(QUESTION, system_prompt)
        template = TEMPLATES.get(template, template)
        if QUESTION not in template:
            shown = template if len(template) <= 60 else template[:57] + "..."
            raise ConfigError(
                f"data.prompt_template is {shown!r}: expected text that contains {QUESTION}, or the name of a template "
                f"({', '.join(TEMPLATES)})"
            )
        return cls(template, system_prompt)

    def messages(self, question: str) -> tuple[dict[str, str], ...]:
        """Return a plain-text question as messages. Other braces in the template are left alone."""
        return self.with_system(({"role": "user", "content": self.template.replace(QUESTION, question)},))

    def with_system(self, messages: tuple[dict[str, str], ...]) -> tuple[dict[str, str], ...]:
        """Put the system prompt first, unless the messages have one."""
        if self.system_prompt is None or messages[0]["role"] == "system":
            return messages
        return ({"role": "system", "content": self.system_prompt}, *messages)
