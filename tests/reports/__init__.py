"""What users of other launchers reported on real accounts, tried here."""
