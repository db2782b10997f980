"""What the scripts share: child processes, turns, facts of the machine, tables, result files."""
