"""Tables of the documents, which tests compare with what is stored or computed."""


def rows_by_first_cell(document: str, heading: str) -> dict[str, list[str]]:
    """The other cells of each row of the table whose first heading is `heading`, by its first cell without backquotes."""
    table = document.split(f"\n| {heading} |", maxsplit=1)[1].split("\n\n", maxsplit=1)[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {first.strip("`"): rest for first, *rest in cells}
