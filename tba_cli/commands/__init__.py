"""The commands of `tba`, one module for each family; parser.py holds their flags."""
