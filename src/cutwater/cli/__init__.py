"""The command line: parse, call, render. One file per noun."""
