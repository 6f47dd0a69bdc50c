"""Reports of a run: history, summary, check of the ledger, tables, HTML."""
