"""Config files: read with lines, checked strictly, structured into attrs classes, and described."""
