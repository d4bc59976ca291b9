"""Standing here, this file puts tests/ on the import path, so that every test can `import rigs`."""
