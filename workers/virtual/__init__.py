"""Workers under virtual time: the production scheduler, ledger and hand-off rules; time from the cost model alone."""
