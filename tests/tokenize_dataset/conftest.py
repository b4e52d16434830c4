from tests.data.conftest import cache as cache
from tests.data.conftest import real_data as real_data
