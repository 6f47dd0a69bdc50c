"""The command line `tba`: one small module per command, imported only when the command runs."""
