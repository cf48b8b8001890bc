"""Reports show values to people: as text, Markdown, HTML and plots."""
