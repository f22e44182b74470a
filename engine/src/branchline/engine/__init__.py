"""The engine worker: service → loop → scheduler | executor → cache. Importing this loads nothing."""
