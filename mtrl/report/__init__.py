"""Pages for people: Markdown, console reports, charts and heat maps, made from plain values."""
