"""What people look at: pages of Markdown, charts and heat maps. Values in, text or a picture out."""
