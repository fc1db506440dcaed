"""Update, selection and statistics of flat buffers."""
