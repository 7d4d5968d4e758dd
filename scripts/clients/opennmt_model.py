"""A small transformer for OpenNMT-tf, without dropout, so that ranks' numbers do not matter."""

import opennmt


def model():
    """Return the model; ``onmt-main --model`` calls this."""
    return opennmt.models.Transformer(
        opennmt.inputters.WordEmbedder(embedding_size=32),
        opennmt.inputters.WordEmbedder(embedding_size=32),
        num_layers=2,
        num_units=32,
        num_heads=4,
        ffn_inner_dim=64,
        dropout=0.0,
        attention_dropout=0.0,
        ffn_dropout=0.0,
    )
