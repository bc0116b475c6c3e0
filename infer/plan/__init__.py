"""The picker behind `medusa plan`: from measured cells, or from calibration, to a way of decoding for a load."""
