"""Where corpora come from: tinyshakespeare, any text, JSONL, Parquet or hub data set; and their tokenizers."""
