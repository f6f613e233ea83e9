"""The report of ``headlong heads evaluate``: figures of what the engine measured, as JSON, Markdown and a plot."""
