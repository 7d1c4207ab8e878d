"""Zero-shot evaluation: models exported, tasks made or fetched, lm-eval run, tables written."""
