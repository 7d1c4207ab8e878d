"""Studies, scales and the programs of one job. Rules under ``workflows/`` decide how and when."""
