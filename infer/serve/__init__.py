"""The server: FastAPI's side (`app`), the thread that decodes (`scheduler`), and what lies between them (`serving`)."""
