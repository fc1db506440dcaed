"""Models that torchvision does not have."""

from models.digits_cnn import DigitsCNN as DigitsCNN
from models.resnet_cifar import resnet20 as resnet20
from models.resnet_cifar import resnet56 as resnet56
from models.resnet_cifar import resnet110 as resnet110
